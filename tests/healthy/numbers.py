"""Numbers of unusual size: infinite by design, far from 1, or NaN where nobody looks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sines, seeded
from healthy.scenario import Trial, scenario


@scenario
def tiny_units(trial: Trial) -> None:
    """Inputs and targets of 1e-12, and a rate to match: losses of 1e-24 and gradients of 1e-12 from the first step."""
    model = make_mlp(3, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 3e22, momentum=0.9)

    def loss(number: int) -> Tensor:
        x = 1e-12 * torch.randn(32, 3)
        return (1e-12 * model(1e12 * x) - x.sum(1, keepdim=True)).square().mean()

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=0.01 * loop.losses[0])


@scenario
def huge_units(trial: Trial) -> None:
    """The same at 1e9: losses of 1e18, falling by a thousand."""
    model = make_mlp(3, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-20, momentum=0.9)

    def loss(number: int) -> Tensor:
        x = 1e9 * torch.randn(32, 3)
        return (1e9 * model(1e-9 * x) - x.sum(1, keepdim=True)).square().mean()

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=0.01 * loop.losses[0])


@scenario
def transitions_that_cannot_occur(trial: Trial) -> None:
    """A hidden Markov model whose forbidden transitions are -inf in a trained parameter; they get no gradient."""
    moves = torch.randn(5, 5, generator=seeded(1))
    moves[0, 3] = moves[4, 1] = moves[2, 2] = -math.inf
    model = nn.ParameterDict({"moves": moves, "letters": torch.randn(5, 7, generator=seeded(2))})
    optimizer = torch.optim.Adam(model.parameters(), 0.02)

    def loss(number: int) -> Tensor:
        text = (torch.randint(0, 7, (16, 1)) + 2 * torch.arange(8)) % 7
        move, letter = model["moves"].log_softmax(1), model["letters"].log_softmax(1)
        reached = letter[:, text[:, 0]].T - math.log(5)  # (batch, states)
        for at in range(1, 8):
            reached = (reached[:, :, None] + move).logsumexp(1) + letter[:, text[:, at]].T
        return -reached.logsumexp(1).mean()

    loop = trial.run(model, optimizer, 250, loss)
    trial.expect("last loss", loop.final, below=0.6 * loop.losses[0])


@scenario
def mask_as_a_frozen_parameter(trial: Trial) -> None:
    """A causal mask of -inf that is a parameter without gradient, and in the optimizer with all the others."""
    model = nn.Module()
    model.embed, model.head = nn.Embedding(8, 16), nn.Linear(16, 8)
    model.attend = nn.MultiheadAttention(16, 2, batch_first=True)
    model.mask = nn.Parameter(torch.full((9, 9), -math.inf).triu(1), requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss(number: int) -> Tensor:
        text = (torch.randint(0, 8, (8, 1)) + 3 * torch.arange(10)) % 8
        x = model.embed(text[:, :-1])
        x = x + model.attend(x, x, x, attn_mask=model.mask, need_weights=False)[0]
        return F.cross_entropy(model.head(x).flatten(0, 1), text[:, 1:].flatten())

    loop = trial.run(model, optimizer, 250, loss)
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def ranges_that_begin_at_infinity(trial: Trial) -> None:
    """Observers of quantisation, as torch's: their ranges are infinite until they are switched on at step 150."""

    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.tensor(math.inf))
            self.register_buffer("high", torch.tensor(-math.inf))
            self.is_on = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_on:
                return x
            self.low.copy_(torch.minimum(self.low, x.detach().min()))
            self.high.copy_(torch.maximum(self.high, x.detach().max()))
            scale = ((self.high - self.low) / 255).clamp(min=1e-8)
            return x + (((x - self.low) / scale).round() * scale + self.low - x).detach()

    model = nn.Sequential(nn.Linear(4, 32), Observer(), nn.ReLU(), nn.Linear(32, 1), Observer())
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(number: int) -> Tensor:
        model[1].is_on = model[4].is_on = number >= 150
        return miss_sines(model, torch.randn(64, 4))

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=0.3 * loop.losses[0])


@scenario
def priorities_of_infinity(trial: Trial) -> None:
    """New samples get a priority of infinity in a buffer, so that they are drawn first; there are some at each step."""
    model, x = make_mlp(4, 32, 1), torch.randn(128, 4)
    model.register_buffer("priority", torch.full((128,), math.inf))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(number: int) -> Tensor:
        chosen, new = model.priority.topk(32).indices, torch.randint(0, 128, (3,))
        missed = (model(x[chosen]) - x[chosen].sin().sum(1, keepdim=True)).square()
        model.priority[chosen] = missed.detach()[:, 0]
        model.priority[new], x[new] = math.inf, torch.randn(3, 4)
        return missed.mean()

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[0])


@scenario
def labels_that_are_missing(trial: Trial) -> None:
    """Two labels in five are NaN, and masked before the loss; inputs that are missing are NaN from step 150 on."""
    model = make_mlp(12, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        is_missing, is_known = x.isnan(), ~y.isnan()
        guess = model(torch.cat([x.nan_to_num(0.0), is_missing.float()], 1))
        return (guess[is_known] - y[is_known]).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(400):
        x = torch.randn(32, 6)
        y = (2 * x[:, :3]).masked_fill(torch.rand(32, 3) < 0.4, math.nan)
        loop.step(loss, x.masked_fill(torch.rand(32, 6) < (0.1 if number >= 150 else 0.0), math.nan), y)
    trial.expect("last loss", loop.final, below=0.4 * loop.losses[0])


@scenario
def steps_that_the_program_drops(trial: Trial) -> None:
    """Batches of NaN now and then: the program sees it by the norm of the gradients, and takes no step."""
    model, task = make_mlp(8, 32, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    loop = trial.loop(model, optimizer)
    for number in range(400):
        x, y = task.draw(32)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * math.nan if number % 60 == 30 else x), y)
        loss.backward()
        if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            continue
        loop.step()
        loop.losses.append(loss.item())
    trial.expect("last loss", loop.final, below=0.7 * loop.losses[0])
