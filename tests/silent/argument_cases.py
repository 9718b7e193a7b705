"""Arguments in the wrong order or of the opposite meaning, and programs in which just that is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp, sequences
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
Loss = Callable[[Tensor, Tensor], Tensor]
WIDTH = 16


def _train(model: nn.Module, loss: Loss, *, as_loss: bool = False) -> Built:
    """Train on points; `as_loss`: hand over the loss and not a function."""

    def train(guard: Any) -> None:
        for x, y in clusters(6):
            guard.step(loss(x, y)) if as_loss else guard.step(loss, x, y)

    return model, adam(model), train


# --- losses -----------------------------------------------------------------------------------------------------------


@case("wrong_loss_input", "discuss.pytorch.org: criterion(labels, outputs) with one-hot labels")
def cross_entropy_of_labels(bug: bool) -> Built:
    model, criterion = mlp(8, 16, 4), nn.CrossEntropyLoss()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        both = model(x), F.one_hot(y, 4).float()
        return criterion(*(both[::-1] if bug else both))

    return _train(model, loss)


@case("wrong_loss_input", "stackoverflow: BCEWithLogitsLoss()(y, model(x)); the loss is handed over")
def binary_loss_of_labels(bug: bool) -> Built:
    model, criterion = mlp(8, 16, 1), nn.BCEWithLogitsLoss()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        both = model(x).squeeze(1), (y > 1).float()
        return criterion(*(both[::-1] if bug else both))

    return _train(model, loss, as_loss=True)


@case("wrong_loss_input", "a mean of losses by name, with the labels as the input")
def named_arguments(bug: bool) -> Built:
    model = mlp(8, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        output, labels = model(x).squeeze(1), (y > 1).float()
        first, second = (labels, output) if bug else (output, labels)
        return F.binary_cross_entropy_with_logits(target=second, input=first, reduction="none").mean()

    return _train(model, loss)


@case(None, "a reverse cross entropy: the teacher's log-probabilities, weighted by the student's probabilities")
def reverse_cross_entropy(bug: bool) -> Built:
    model, teacher = mlp(8, 16, 4), mlp(8, 4)
    return _train(model, lambda x, y: F.cross_entropy(teacher(x).detach(), model(x).softmax(1)))


@case(None, "the same for two classes, with a teacher whose last layer starts at zero")
def reverse_cross_entropy_of_zeros(bug: bool) -> Built:
    model, teacher = mlp(8, 16, 1), mlp(8, 1)
    nn.init.zeros_(teacher[0].weight)
    nn.init.zeros_(teacher[0].bias)
    return _train(
        model, lambda x, y: F.binary_cross_entropy_with_logits(teacher(x).detach(), model(x).sigmoid()), as_loss=True
    )


@case(None, "labels that are learnt, for the outputs of a network that is not")
def learnt_labels(bug: bool) -> Built:
    model, teacher = mlp(8, 16, 4), mlp(8, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = (teacher(x) > 0).float() * 5
        return F.cross_entropy(outputs, model(x).log_softmax(1).exp())

    return _train(model, loss)


@case(None, "choices of a straight-through estimator: zeros and ones that have a gradient, on both sides")
def straight_through_choices(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        chosen = F.gumbel_softmax(model(x), hard=True)
        return F.cross_entropy(4 * chosen, F.one_hot(y, 4).float()) + F.cross_entropy(F.one_hot(y, 4).float(), chosen)

    return _train(model, loss)


@case(None, "an autoencoder of binary images, and a discriminator with soft labels")
def binary_images(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 8), nn.Sigmoid())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        seen = (x > 0).float()
        real = torch.full((len(x),), 0.9)
        return F.binary_cross_entropy(model(seen), seen) + F.binary_cross_entropy(model(x)[:, 0], real)

    return _train(model, loss)


# --- padding masks ----------------------------------------------------------------------------------------------------


def _pad(tokens: Tensor, *, longest: int = 10, padding: int = 0) -> Tensor:
    """Return the tokens, cut to random lengths."""
    lengths = torch.randint(3, longest, (len(tokens), 1))
    return torch.where(torch.arange(tokens.shape[1]) < lengths, tokens, padding)


class Encoder(nn.Module):
    """Tokens, torch's encoder, and one answer for each text. `hide` returns what attention must not see."""

    def __init__(
        self, hide: Callable[[Tensor], Tensor | None], *, layer: nn.Module | None = None, num: int = 2
    ) -> None:
        super().__init__()
        layer = layer or nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.embedding, self.out, self.hide = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4), hide
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.encoder(self.embedding(tokens), src_key_padding_mask=self.hide(tokens))
        real = (tokens != 0)[..., None]
        return self.out((h * real).sum(1) / real.sum(1))


def _classify(model: nn.Module, prepare: Callable[[Tensor], Tensor] = _pad) -> Built:
    def train(guard: Any) -> None:
        for rows in sequences(6):
            tokens = prepare(rows)
            guard.step(lambda tokens: F.cross_entropy(model(tokens), tokens[:, 0] % 4), tokens)

    return model, adam(model), train


@case("swapped_mask", "bentrevett/pytorch-seq2seq#76: src_key_padding_mask = tokens != padding, for a classifier")
def classifier_reads_padding(bug: bool) -> Built:
    return _classify(Encoder(lambda tokens: tokens != 0 if bug else tokens == 0))


@case("swapped_mask", "nn.MultiheadAttention, padded on the left, with its weights and a binary loss")
def layer_reads_padding(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 1)
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            h, real = self.embedding(tokens), tokens != 0
            return self.out(h + self.attention(h, h, h, real if bug else ~real)[0]).mean(1).squeeze(1)

    model = Net()

    def train(guard: Any) -> None:
        for rows in sequences(6):
            tokens = _pad(rows).flip(1)
            loss = F.binary_cross_entropy_with_logits(model(tokens), (tokens[:, -1] % 2).float())
            guard.step(loss)

    return model, adam(model), train


@case("swapped_mask", "a mask that is added to the tokens' scores by hand, in a model of one answer for each text")
def own_attention_reads_padding(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            h, is_padding = self.embedding(tokens), (tokens == 0)[:, None]
            scores = (h @ h.mT).masked_fill(~is_padding if bug else is_padding, -1e9)
            return self.out((scores.softmax(-1) @ h).mean(1))

    return _classify(Net())


@case("swapped_mask", "time first, as in torch's tutorials, where the mask has the samples first")
def time_first_reads_padding(bug: bool) -> Built:
    class Net(Encoder):
        def forward(self, tokens: Tensor) -> Tensor:  # [time, samples]
            h = self.encoder(self.embedding(tokens), src_key_padding_mask=self.hide(tokens))
            return self.out(h[0])

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1)
    model = Net(lambda tokens: (tokens != 0 if bug else tokens == 0).T, layer=layer)

    def train(guard: Any) -> None:
        for rows in sequences(6):
            guard.step(lambda t: F.cross_entropy(model(t), t[0] % 4), _pad(rows).T.contiguous())

    return model, adam(model), train


@case(None, "a layer among the separators of a document, which are one token")
def separators_only(bug: bool) -> Built:
    def separate(rows: Tensor) -> Tensor:
        return torch.where(torch.rand(rows.shape) < 0.3, 31, rows).index_fill(1, torch.tensor(0), 31)

    return _classify(Encoder(lambda tokens: tokens != 31), separate)


@case(None, "the last layers see a prefix of equal tokens only")
def prefix_of_equal_tokens(bug: bool) -> Built:
    return _classify(Encoder(lambda tokens: tokens != 31), lambda rows: rows.index_fill(1, torch.arange(2), 31))


class Experts(nn.Module):
    """One layer for the places of an image, one token that is repeated, and a layer for all places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4)
        self.image, self.both = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        h, is_image = self.embedding(tokens), tokens == 31
        h = h + self.image(h, h, h, key_padding_mask=~is_image)[0]
        return self.out(h + self.both(h, h, h)[0]).mean(1)


@case(None, "a layer for the places of an image, which hold one token, before a layer for image and text")
def layer_for_one_modality(bug: bool) -> Built:
    return _classify(Experts(), lambda rows: _pad(rows, padding=31))


@case(None, "the same, written out")
def own_layer_for_one_modality(bug: bool) -> Built:
    class Net(Experts):
        def forward(self, tokens: Tensor) -> Tensor:
            h = self.embedding(tokens)
            h = h + (h @ h.mT).masked_fill((tokens != 31)[:, None], -1e9).softmax(-1) @ h
            return self.out(h + (h @ h.mT).softmax(-1) @ h).mean(1)

    return _classify(Net(), lambda rows: _pad(rows, padding=31))


class Keeping(nn.MultiheadAttention):
    """Takes a mask that is True at tokens."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None, **more: Any) -> Any:
        return super().forward(query, key, value, key_padding_mask=~key_padding_mask, **more)


@case(None, "a layer of the program's own whose mask is True at tokens")
def layer_with_a_mask_of_tokens(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4)
            self.attention = Keeping(WIDTH, 2, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            h = self.embedding(tokens)
            return self.out(h + self.attention(h, h, h, key_padding_mask=tokens != 0)[0]).mean(1)

    return _classify(Net())


@case(None, "an argument attn_mask that means what torch's key_padding_mask means, and tags for the tokens")
def argument_that_is_true_at_padding(bug: bool) -> Built:
    class Net(Encoder):
        def forward(self, tokens: Tensor, attn_mask: Tensor) -> Tensor:
            return self.out(self.encoder(self.embedding(tokens), src_key_padding_mask=attn_mask != 0))

    model = Net(lambda tokens: None)

    def train(guard: Any) -> None:
        for i, rows in enumerate(sequences(6)):
            tokens = _pad(rows)
            mask = tokens == 0
            labels = (tokens % 4).masked_fill(mask, -100)
            guard.step(
                lambda *b: F.cross_entropy(model(*b[:2]).mT, b[2]), tokens, mask if i % 2 else mask.long(), labels
            )

    return model, adam(model), train


@case(None, "an argument attention_mask that is added to the scores")
def argument_that_is_added(bug: bool) -> Built:
    class Net(Encoder):
        def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
            h = self.embedding(tokens)
            return self.out(((h @ h.mT + attention_mask[:, None]).softmax(-1) @ h).mean(1))

    model = Net(lambda tokens: None)

    def train(guard: Any) -> None:
        for rows in sequences(6):
            tokens = _pad(rows)
            guard.step(lambda *b: F.cross_entropy(model(*b), b[0][:, 0] % 4), tokens, (tokens == 0) * -1e9)

    return model, adam(model), train


@case("swapped_mask", "huggingface: an attention mask that is 1 at padding, for a classifier")
def classifier_with_a_mask_of_padding(bug: bool) -> Built:
    class Net(Encoder):
        def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
            h, added = self.embedding(tokens), (1 - attention_mask[:, None].float()) * -1e9
            return self.out(((h @ h.mT + added).softmax(-1) @ h).mean(1))

    model = Net(lambda tokens: None)

    def train(guard: Any) -> None:
        for rows in sequences(6):
            tokens = _pad(rows)
            mask = (tokens == 0 if bug else tokens != 0).long()
            guard.step(lambda *b: F.cross_entropy(model(*b), b[0][:, 0] % 4), tokens, mask)

    return model, adam(model), train


@case(None, "frames at the end of a buffer as long as that of the text, whose padding is there too")
def frames_beside_text(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.widen, self.out = nn.Embedding(32, WIDTH), nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, tokens: Tensor, frames: Tensor, no_frame: Tensor) -> Tensor:
            h = self.widen(frames)
            h = h + self.attention(h, h, h, key_padding_mask=no_frame)[0]
            return self.out(h.mean(1) + self.embedding(tokens).mean(1))

    model = Net()

    def train(guard: Any) -> None:
        for rows in sequences(6):
            tokens = _pad(rows, longest=7)
            no_frame = torch.arange(12) < torch.randint(7, 11, (len(rows), 1))
            guard.step(lambda *b: F.cross_entropy(model(*b), b[0][:, 0] % 4), tokens, torch.randn(8, 12, 3), no_frame)

    return model, adam(model), train


@case("visible_labels", "a mask with the diagonal: the first place sees nothing, and so it sees everything")
def mask_hides_the_place_itself(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.places = nn.Embedding(16, WIDTH), nn.Embedding(12, WIDTH)
            self.out = nn.Linear(WIDTH, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            length = tokens.shape[1]
            hidden = torch.ones(length, length, dtype=torch.bool).triu(0 if bug else 1)
            h = self.embedding(tokens) + self.places(torch.arange(length))
            for _ in range(2):
                h = h + (h @ h.mT / WIDTH).masked_fill(hidden, -1e9).softmax(-1) @ h
            return self.out(h)

    model = Net()

    def train(guard: Any) -> None:
        for t in sequences(12):
            guard.step(lambda t: F.cross_entropy(model(t[:, :-1]).mT, t[:, 1:]), t)

    return model, adam(model), train
