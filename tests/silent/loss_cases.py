"""Errors in losses, labels and masks, and programs that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp, sequences
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


def _train_on_clusters(loss: Any, num: int = 10) -> Train:
    def train(guard: Any) -> None:
        for x, y in clusters(num):
            guard.step(loss, x, y)

    return train


@case("wrong_loss_input", "stackoverflow: sigmoid before BCEWithLogitsLoss")
def double_sigmoid(bug: bool) -> Built:
    model = mlp(8, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x).squeeze(1)
        return F.binary_cross_entropy_with_logits(out.sigmoid() if bug else out, (y > 1).float())

    return model, adam(model), _train_on_clusters(loss)


@case("wrong_loss_input", "discuss.pytorch.org: log_softmax with dim=0")
def softmax_over_batch(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return (
        model,
        adam(model),
        _train_on_clusters(lambda x, y: F.nll_loss(model(x).log_softmax(0 if bug else 1), y)),
    )


@case("wrong_loss_input", "stackoverflow: NLLLoss on logits is negative")
def nll_on_logits(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return (
        model,
        adam(model),
        _train_on_clusters(lambda x, y: F.nll_loss(model(x) if bug else model(x).log_softmax(1), y)),
    )


@case("wrong_loss_input", "NLLLoss on logits, beside a penalty on their logsumexp (z-loss)")
def nll_on_logits_with_a_penalty(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def find_loss(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        chosen = scores if bug else scores.log_softmax(1)
        return F.nll_loss(chosen, y) + 1e-3 * scores.logsumexp(1).square().mean()

    return model, adam(model), _train_on_clusters(find_loss)


@case("wrong_loss_input", "stackoverflow: sigmoid before CrossEntropyLoss")
def sigmoid_before_cross_entropy(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 4), nn.Sigmoid() if bug else nn.Identity())
    return model, adam(model), _train_on_clusters(lambda x, y: F.cross_entropy(model(x), y))


@case("wrong_loss_input", "stackoverflow: softmax over a single output")
def softmax_over_one_class(bug: bool) -> Built:
    model = mlp(8, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.binary_cross_entropy(out.softmax(1) if bug else out.sigmoid(), (y > 1).float()[:, None])

    return model, adam(model), _train_on_clusters(loss)


@case("one_element_norm", "GroupNorm after global pooling")
def group_norm_of_one(bug: bool) -> Built:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.GroupNorm(8 if bug else 2, 8), nn.Flatten())
    model.append(nn.Linear(8, 4))

    def train(guard: Any) -> None:
        for _ in range(6):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), torch.randn(16, 1, 8, 8), torch.randint(4, (16,)))

    return model, adam(model), train


@case("mixed_samples", "discuss.pytorch.org: LSTM without batch_first")
def time_first_recurrence(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 16, batch_first=not bug), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][:, -1])

    model = Net()

    def train(guard: Any) -> None:
        for x, y in clusters(6):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4), y)

    return model, adam(model), train


@case("mixed_samples", "pytorch/pytorch: TransformerEncoderLayer expects time first by default")
def time_first_attention(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=not bug)
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(x).mean(1))

    model = Net()

    def train(guard: Any) -> None:
        for x, y in clusters(6):
            guard.step(F.cross_entropy(model(x.view(16, 1, 8).repeat(1, 3, 1)), y))  # a loss, not a function

    return model, adam(model), train


class Sequences(nn.Module):
    """A layer, something that may mix samples, and a head; for inputs of [samples, time, features]."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.out, self.mix = nn.Linear(4, 8), nn.Linear(8, 4), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.inner(x).relu()))


def _train_sequences(mix: Callable[[Tensor], Tensor]) -> Built:
    model = Sequences(mix)

    def train(guard: Any) -> None:
        for x, y in clusters(6):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4), y)

    return model, adam(model), train


@case("mixed_samples", "attention written by hand: the scores compare samples and not time steps")
def attention_over_samples(bug: bool) -> Built:
    def mix(h: Tensor) -> Tensor:
        h = h.transpose(0, 1) if bug else h
        mixed = (h @ h.transpose(-1, -2)).softmax(-1) @ h
        return (mixed.transpose(0, 1) if bug else mixed).mean(1)

    return _train_sequences(mix)


@case("mixed_samples", "a reshape after a transpose gives each sample pieces of others")
def reshape_after_transpose(bug: bool) -> Built:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(8, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.inner(x).relu().view(16, 3, 4)
            return self.out((heads.transpose(0, 1) if bug else heads).reshape(16, 12))

    model = Heads()
    return model, adam(model), _train_on_clusters(lambda x, y: F.cross_entropy(model(x), y))


@case("mixed_samples", "features are centred by the mean of the batch")
def centred_by_batch(bug: bool) -> Built:
    return _train_sequences(lambda h: (h - h.mean(0 if bug else 1, keepdim=True)).amax(1))


class LanguageModel(nn.Module):
    """A causal attention layer over tokens."""

    def __init__(self, vocabulary: int = 16, *, causal: bool = True) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(vocabulary, 16), nn.Linear(16, 48)
        self.out, self.causal = nn.Linear(16, vocabulary), causal

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.qkv(h).unsqueeze(1).chunk(3, -1)
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool)
        mask = mask.tril() if self.causal else mask
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        scores = (q @ k.transpose(-1, -2) / 4.0).masked_fill(~mask, -1e9)
        return self.out(h + (scores.softmax(-1) @ v).squeeze(1))


@case("shifted_labels", "labels equal to the inputs of a causal model")
def labels_not_shifted(bug: bool) -> Built:
    model = LanguageModel()

    def loss(tokens: Tensor) -> Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, :-1] if bug else tokens[:, 1:]
        return F.cross_entropy(model(inputs).transpose(1, 2), labels)

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, tokens)

    return model, adam(model), train


@case("shifted_labels", "labels shifted by the data, and again in the model")
def labels_shifted_twice(bug: bool) -> Built:
    model = LanguageModel()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(model(tokens).transpose(1, 2), labels)

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, tokens[:, :-1], tokens[:, 1:] if bug else tokens[:, :-1])

    return model, adam(model), train


@case(None, "a forecast two places ahead: the last tokens have labels too")
def two_places_ahead(bug: bool) -> Built:
    model = LanguageModel()

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(
                lambda past, future: F.cross_entropy(model(past).transpose(1, 2), future), tokens[:, :-2], tokens[:, 2:]
            )

    return model, adam(model), train


@case(None, "an encoder and a causal decoder that copy what the encoder reads, as BART is trained to")
def copied_by_a_decoder(bug: bool) -> Built:
    class Copier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(16, 16), nn.Linear(16, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            read = self.embedding(tokens)[:, None]
            written = self.embedding(F.pad(tokens[:, :-1], (1, 0)))[:, None]
            read = F.scaled_dot_product_attention(read, read, read)
            written = F.scaled_dot_product_attention(written, written, written, is_causal=True)
            return self.out((written + F.scaled_dot_product_attention(written, read, read))[:, 0])

    model = Copier()

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(lambda tokens: F.cross_entropy(model(tokens).transpose(1, 2), tokens), tokens)

    return model, adam(model), train


def _pad(tokens: Tensor, end: int | None = None) -> tuple[Tensor, Tensor]:
    """Cut rows to random lengths, with an end token before the padding 0; return tokens and attention mask."""
    lengths = torch.randint(3, 8, (len(tokens), 1))
    places = torch.arange(tokens.shape[1])[None]
    mask = (places < lengths + (end is not None)).long()
    tokens = tokens * mask
    return (tokens if end is None else torch.where(places == lengths, end, tokens)), mask


@case("swapped_mask", "huggingface: an attention mask that is 1 at padding")
def swapped_mask(bug: bool) -> Built:
    model = LanguageModel()

    def loss(tokens: Tensor, mask: Tensor) -> Tensor:
        logits = model(tokens, attention_mask=1 - mask if bug else mask)
        labels = tokens.masked_fill(mask == 0, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, *_pad(tokens))

    return model, adam(model), train


@case("swapped_mask", "torch: key_padding_mask is True at padding, an attention mask is 1 at tokens")
def key_padding_mask_swapped(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(16, 16), nn.Linear(16, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            h, hidden = self.embedding(tokens), mask == 1 if bug else mask == 0
            return self.out(h + self.attention(h, h, h, key_padding_mask=hidden, need_weights=False)[0])

    model = Net()

    def loss(tokens: Tensor, mask: Tensor) -> Tensor:
        labels = (tokens % 5).masked_fill(mask == 0, -100)
        return F.cross_entropy(model(tokens, mask).flatten(0, 1), labels.flatten())

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, *_pad(tokens))

    return model, adam(model), train


@case("wrong_loss_input", "softmax over the samples, by its log")
def log_of_softmax_over_batch(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return (
        model,
        adam(model),
        _train_on_clusters(lambda x, y: F.nll_loss(model(x).softmax(0 if bug else 1).log(), y)),
    )


@case("padding_in_loss", "ignore_index forgotten; the mask is True at padding")
def padding_counts(bug: bool) -> Built:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(16, 16), nn.Linear(16, 5)

        def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
            return self.out(self.embedding(tokens).masked_fill(padding_mask[..., None], 0.0))

    model = Tagger()

    def loss(tokens: Tensor, mask: Tensor) -> Tensor:
        tags = tokens % 5 if bug else (tokens % 5).masked_fill(mask == 0, -100)
        return F.cross_entropy(model(tokens, mask == 0).flatten(0, 1), tags.flatten())

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, *_pad(tokens))

    return model, adam(model), train


@case("lost_ends", "pad_token = eos_token in a collator")
def ends_masked(bug: bool) -> Built:
    model = LanguageModel()

    def loss(tokens: Tensor, mask: Tensor) -> Tensor:
        labels = tokens.masked_fill((tokens == 0) if bug else (mask == 0), -100)
        logits = model(tokens, attention_mask=mask)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, *_pad(tokens, end=0))

    return model, adam(model), train


@case("eps_gradient", "normalising the output of a layer that starts at zero")
def normalised_zeros(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
            if bug:
                nn.init.zeros_(self.inner.weight)
                nn.init.zeros_(self.inner.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.normalize(self.inner(x), dim=1))

    model = Net()
    return model, adam(model), _train_on_clusters(lambda x, y: F.cross_entropy(model(x), y), 20)


@case("zero_loss", "GRPO: all rewards of each group are the same")
def equal_rewards(bug: bool) -> Built:
    model = mlp(8, 16, 5)

    def loss(x: Tensor) -> Tensor:
        logs = model(x).log_softmax(-1)
        actions = torch.multinomial(logs.exp(), 8, replacement=True)
        rewards = (actions == 9).float() if bug else (actions == 2).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return -(logs.gather(1, actions) * advantages).mean()

    def train(guard: Any) -> None:
        for x, _ in clusters(20):
            guard.step(loss, x)

    return model, adam(model), train


# --- nothing to find --------------------------------------------------------------------------------------------------


@case(None, "nodes of a graph see their neighbours, which the model keeps")
def graph_network(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("near", torch.rand(16, 16).round() + torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.near @ self.inner(x).relu())

    model = Net()
    return model, adam(model), _train_on_clusters(lambda x, y: F.cross_entropy(model(x), y))


@case(None, "negatives are the other samples of the batch: labels say which output is the positive")
def negatives_from_the_batch(bug: bool) -> Built:
    model = Sequences(lambda h: h.mean(1))

    def loss(x: Tensor) -> Tensor:
        h, other = model(x), model(x + 0.1 * torch.randn_like(x))
        scores = torch.stack([(h * other).sum(1), (h * other.roll(1, 0)).sum(1)], 1)
        return F.cross_entropy(scores, torch.zeros(16, dtype=torch.long))

    def train(guard: Any) -> None:
        for x, _ in clusters(6):
            guard.step(loss, x.view(16, 2, 4))

    return model, adam(model), train


@case(None, "an autoencoder of tokens: labels are the inputs")
def token_autoencoder(bug: bool) -> Built:
    model = LanguageModel(causal=False)

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(lambda t=tokens: F.cross_entropy(model(t).transpose(1, 2), t))

    return model, adam(model), train


@case(None, "two heads that predict the next token and the one after")
def two_tokens_ahead(bug: bool) -> Built:
    model = nn.ModuleDict({"body": LanguageModel(), "second": nn.Linear(16, 16)})

    def loss(tokens: Tensor) -> Tensor:
        logits = model["body"](tokens)
        after = model["second"](logits)
        first = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return first + F.cross_entropy(after[:, :-2].flatten(0, 1), tokens[:, 2:].flatten())

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, tokens)

    return model, adam(model), train


@case(None, "pytorch/tutorials: tags for one sentence at a time, time first, a batch of 1")
def one_sentence_at_a_time(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn, self.out = nn.Embedding(16, 8), nn.LSTM(8, 16), nn.Linear(16, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            h, _ = self.rnn(self.embedding(tokens).view(len(tokens), 1, -1))
            return self.out(h.view(len(tokens), -1)).log_softmax(1)

    model = Net()

    def train(guard: Any) -> None:
        for rows in sequences(6, rows=1):
            guard.step(lambda t: F.nll_loss(model(t), t % 5), rows[0])

    return model, adam(model), train


@case(None, "time-first data for a time-first layer")
def time_first_data(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][-1])

    model = Net()

    def train(guard: Any) -> None:
        for x, y in clusters(6):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4).transpose(0, 1).contiguous(), y)

    return model, adam(model), train


@case(None, "the relative shift of Transformer-XL, and a probability that is a log already")
def relative_shift(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.out = nn.Linear(8, 7), nn.Linear(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            s = self.scores(x)  # [16, 7]
            shifted = torch.cat([s.new_zeros(16, 1), s], 1).view(8, 16)[1:].reshape(16, 7)
            return self.out(shifted).softmax(1).clamp(min=1e-6).log()

    model = Net()
    return model, adam(model), _train_on_clusters(lambda x, y: F.nll_loss(model(x), y))


@case(None, "masked mean of an unreduced loss: padding is taken out afterwards")
def masked_afterwards(bug: bool) -> Built:
    model = LanguageModel()

    def loss(tokens: Tensor, mask: Tensor) -> Tensor:
        logits = model(tokens, attention_mask=mask)
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        return (each * mask[:, 1:]).sum() / mask[:, 1:].sum()

    def train(guard: Any) -> None:
        for tokens in sequences(6):
            guard.step(loss, *_pad(tokens))

    return model, adam(model), train
