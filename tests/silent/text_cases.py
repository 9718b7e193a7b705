"""Language models that see what they are to predict, and models of text that may see all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, sequences
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
WIDTH, LENGTH = 16, 12


class Text(nn.Module):
    """An embedding with positions, something that mixes places, and a head."""

    def __init__(self, mix: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.parts, self.out, self.mix = nn.ModuleList(parts), nn.Linear(WIDTH, 16), mix

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        h = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = self.out(self.mix(h, *self.parts))
        if labels is None:
            return logits
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]  # shifted inside, as transformers does it
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _train(loss: Callable[[Tensor], Tensor], num: int = 12) -> Train:
    def train(guard: Any) -> None:
        for tokens in sequences(num):
            guard.step(loss, tokens)

    return train


def _predict_next(model: nn.Module) -> Train:
    return _train(lambda t: F.cross_entropy(model(t[:, :-1]).transpose(1, 2), t[:, 1:]))


def _attend(h: Tensor, hidden: Tensor | None, *, after: bool = False) -> Tensor:
    scores = h @ h.transpose(1, 2) / WIDTH
    if hidden is None:
        return h + scores.softmax(-1) @ h
    if after:
        return h + scores.softmax(-1).masked_fill(hidden, 0.0) @ h
    return h + scores.masked_fill(hidden, -1e9).softmax(-1) @ h


def _later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@case("visible_labels", "a language model without a causal mask")
def no_mask(bug: bool) -> Built:
    model = Text(lambda h: _attend(h, None if bug else _later(h.shape[1])))
    return model, adam(model), _predict_next(model)


@case("visible_labels", "the labels are the inputs and are shifted in the model; the mask reaches the first layer only")
def mask_in_one_layer(bug: bool) -> Built:
    def mix(h: Tensor) -> Tensor:
        hidden = _later(h.shape[1])
        return _attend(_attend(h, hidden), None if bug else hidden)

    model = Text(mix)
    return model, adam(model), _train(lambda t: model(t, labels=t))


@case("visible_labels", "tril for triu: the mask hides what came before")
def mask_of_the_past(bug: bool) -> Built:
    model = Text(lambda h: _attend(h, _later(h.shape[1]).T if bug else _later(h.shape[1])))

    def train(guard: Any) -> None:
        for t in sequences(12):
            guard.step(F.cross_entropy(model(t)[:, :-1].flatten(0, 1), t[:, 1:].flatten()))  # a loss, not a function

    return model, adam(model), train


@case("visible_labels", "the mask is applied behind the softmax, whose sum has seen it all")
def mask_after_softmax(bug: bool) -> Built:
    model = Text(lambda h: _attend(h, _later(h.shape[1]), after=bug))
    return model, adam(model), _predict_next(model)


@case("visible_labels", "scaled_dot_product_attention without is_causal")
def attention_without_flag(bug: bool) -> Built:
    def mix(h: Tensor) -> Tensor:
        return h + F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], is_causal=not bug).squeeze(1)

    model = Text(mix)
    return model, adam(model), _predict_next(model)


@case("visible_labels", "pytorch/examples word_language_model: nn.TransformerEncoder, time first, without its mask")
def time_first_without_mask(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1)
            self.embedding, self.out = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, tokens: Tensor) -> Tensor:  # [places, rows]
            mask = None if bug else nn.Transformer.generate_square_subsequent_mask(len(tokens))
            return self.out(self.encoder(self.embedding(tokens), mask=mask)).log_softmax(-1)

    model = Net()

    def loss(rows: Tensor) -> Tensor:
        tokens = rows.T.contiguous()
        return F.nll_loss(model(tokens[:-1]).view(-1, 16), tokens[1:].reshape(-1))

    return model, adam(model), _train(loss)


@case("visible_labels", "stackoverflow: a bidirectional LSTM as a language model")
def bidirectional_language_model(bug: bool) -> Built:
    rnn = nn.LSTM(WIDTH, WIDTH // (1 + bug), batch_first=True, bidirectional=bug)
    model = Text(lambda h, rnn: rnn(h)[0], rnn)
    return model, adam(model), _predict_next(model)


@case("visible_labels", "a convolution that is padded on both sides")
def convolution_padded_on_both_sides(bug: bool) -> Built:
    def mix(h: Tensor, conv: nn.Module) -> Tensor:
        return conv(F.pad(h.transpose(1, 2), (1, 1) if bug else (2, 0))).transpose(1, 2).relu()

    model = Text(mix, nn.Conv1d(WIDTH, WIDTH, 3))
    return model, adam(model), _predict_next(model)


class Translator(nn.Module):
    """nn.Transformer; with `shared` one embedding of its own for both sides."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.embedding, self.out, self.masked = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16), masked
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) if self.masked else None
        return self.out(self.body(self.embedding(source), self.embedding(target), tgt_mask=mask))


@case("visible_labels", "a decoder without tgt_mask")
def decoder_without_mask(bug: bool) -> Built:
    model = Translator(masked=not bug)
    return model, adam(model), _train(lambda t: F.cross_entropy(model(t.flip(1), t[:, :-1]).mT, t[:, 1:]))


# --- nothing to find --------------------------------------------------------------------------------------------------


@case(None, "a sequence that is copied: the encoder sees what the decoder is to predict")
def copied_sequence(bug: bool) -> Built:
    model = Translator()
    return model, adam(model), _train(lambda t: F.cross_entropy(model(t, t[:, :-1]).mT, t[:, 1:]))


@case(None, "a sentence VAE: the whole sentence is summed up in a vector, from the embedding that the decoder reads")
def sentence_autoencoder(bug: bool) -> Built:
    def mix(h: Tensor, encoder: nn.Module, decoder: nn.Module, widen: nn.Module) -> Tensor:
        latent = encoder(h)[1][0][-1]
        latent = latent + 0.1 * torch.randn_like(latent)
        return decoder(h)[0] + widen(latent)[:, None]

    lstms = nn.LSTM(WIDTH, LENGTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)
    model = Text(mix, *lstms, nn.Linear(LENGTH, WIDTH))
    return model, adam(model), _predict_next(model)


@case(None, "a prefix that is seen whole, with labels for all of the text")
def prefix_language_model(bug: bool) -> Built:
    def mix(h: Tensor) -> Tensor:
        hidden = _later(h.shape[1])
        hidden[:, :5] = False
        return _attend(h, hidden)

    model = Text(mix)
    return model, adam(model), _train(lambda t: model(t, labels=t))


@case(None, "an encoder that fills in masked tokens")
def masked_language_model(bug: bool) -> Built:
    model = Text(lambda h: _attend(h, None))

    def loss(tokens: Tensor) -> Tensor:
        is_masked = torch.rand(tokens.shape) < 0.4
        labels = tokens.masked_fill(~is_masked, -100)
        return F.cross_entropy(model(tokens.masked_fill(is_masked, 0)).transpose(1, 2), labels)

    return model, adam(model), _train(loss)


@case(None, "outputs and tokens without the first place, which stands for the whole text: nothing is shifted")
def without_the_first_place(bug: bool) -> Built:
    model = Text(lambda h: _attend(h, None))
    return model, adam(model), _train(lambda t: F.cross_entropy(model(t)[:, 1:].transpose(1, 2), t[:, 1:]))


@case(None, "tags of words, by a model that reads the whole sentence")
def bidirectional_tagger(bug: bool) -> Built:
    rnn = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
    model = Text(lambda h, rnn: rnn(h)[0], rnn)
    return model, adam(model), _train(lambda t: F.cross_entropy(model(t).transpose(1, 2), t % 5))


@case(None, "a long convolution by FFT, whose rounding reaches every place")
def convolution_by_fft(bug: bool) -> Built:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            size, length = 2 * LENGTH, h.shape[1]
            spectrum = torch.fft.rfft(h, size, dim=1) * torch.fft.rfft(self.weight[:length], size, dim=0)
            return torch.fft.irfft(spectrum, size, dim=1)[:, :length]

    model = Text(lambda h, kernel: kernel(h), Kernel())
    return model, adam(model), _predict_next(model)


@case(None, "diffusion with shifted outputs: what counts was masked in the input")
def shifted_diffusion(bug: bool) -> Built:
    model = Text(lambda h: _attend(h, None))

    def loss(tokens: Tensor) -> Tensor:
        is_masked = torch.rand(tokens.shape) < 0.5
        return model(tokens.masked_fill(is_masked, 0), labels=tokens.masked_fill(~is_masked, -100))

    return model, adam(model), _train(loss)
