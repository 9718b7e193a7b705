"""Programs that look like a known error and are right: no rule says anything above an info."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad import Guard
from steadygrad.facts import Severity


def make_net(*sizes: int) -> nn.Sequential:
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def rank_pairs() -> Guard:
    """Differences of all pairs of scores, as in RankNet."""
    model = make_net(6, 32, 1)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))

    def find_loss(x: Tensor) -> Tensor:
        scores, truth = model(x), x[:, 0]
        wins = (truth[:, None] > truth[None, :]).float()
        return F.binary_cross_entropy_with_logits(scores - scores.squeeze(1), wins)

    for _ in range(60):
        guard.step(find_loss, torch.randn(32, 6))
    return guard


def classify_log_probabilities() -> Guard:
    """A model that returns log-probabilities, and a loss that takes their logarithm again: the same numbers."""
    model = nn.Sequential(make_net(6, 32, 4), nn.LogSoftmax(1))
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))
    for _ in range(60):
        x = torch.randn(32, 6)
        guard.step(lambda x: F.cross_entropy(model(x), x[:, :4].argmax(1)), x)
    return guard


def sum_over_tokens() -> Guard:
    """A mean loss times a number of tokens that is a power of two."""
    model = make_net(6, 32, 4)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))
    for _ in range(60):
        x, mask = torch.randn(128, 6), torch.ones(128)
        guard.step(F.cross_entropy(model(x), x[:, :4].argmax(1)) * mask.sum())
    return guard


def log_the_norm_of_a_microbatch() -> Guard:
    """`clip_grad_norm_` with an infinite limit after the first of two microbatches."""
    model = make_net(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    guard = Guard(model, optimizer)
    for _ in range(60):
        optimizer.zero_grad()
        for number in range(2):
            x = torch.randn(32, 6)
            (model(x).squeeze(1) - x[:, 0]).square().mean().div(2).backward()
            if number == 0:
                nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        guard.step()
    return guard


class Polyak(torch.optim.Optimizer):
    """Finds the length of a step from the loss; its learning rate is not used."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.loss = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        length = 0.5 * min(self.loss / (sum(float(p.grad.square().sum()) for p in parameters) + 1e-8), 0.5)
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=-length)


def find_the_rate_itself() -> Guard:
    """An optimizer that leaves its learning rate at 0."""
    model = make_net(6, 32, 1)
    optimizer = Polyak(model.parameters())
    guard = Guard(model, optimizer)
    for _ in range(120):
        x = torch.randn(32, 6)
        loss = (model(x).squeeze(1) - x[:, 0]).square().mean()
        optimizer.loss = loss.item()
        guard.step(loss)
    return guard


def judge_real_and_fake_in_turn() -> Guard:
    """A discriminator with two logits, which sees real samples in one step and others in the next."""
    model = make_net(2, 32, 2)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 1e-3))
    for number in range(120):
        x = torch.randn(64, 2) + (2.0 if number % 2 else -2.0)
        guard.step(lambda x, y: F.cross_entropy(model(x), y), x, torch.full((64,), number % 2))
    return guard


def average_heads_and_microbatches() -> Guard:
    """Four heads are averaged, and four microbatches: two different fours."""
    body, heads = make_net(6, 32, 16), nn.ModuleList(nn.Linear(16, 1) for _ in range(4))
    model = nn.ModuleList([body, heads])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    guard = Guard(model, optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        for _ in range(4):
            x = torch.randn(16, 6)
            h = body(x).relu()
            total = sum(F.mse_loss(head(h).squeeze(1), x[:, i]) for i, head in enumerate(heads))
            guard.backward(total / 4 / 4)
        guard.step()
    return guard


class InTurns(torch.optim.Optimizer):
    """Block coordinate descent: each group has its turn."""

    def __init__(self, groups: Any, turn: int) -> None:
        super().__init__(groups, {"lr": 0.05})
        self.turn, self.num_steps = turn, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[self.num_steps // self.turn % len(self.param_groups)]
        self.num_steps += 1
        for parameter in group["params"]:
            parameter.add_(parameter.grad, alpha=-group["lr"])


def move_blocks_in_turns() -> Guard:
    """A block that has waited for its turn since the first step."""
    model = make_net(6, 32, 32, 1)
    guard = Guard(model, InTurns([{"params": list(model[i].parameters())} for i in (0, 2, 4)], turn=150))
    for _ in range(460):
        guard.step(lambda x: F.mse_loss(model(x).squeeze(1), x[:, 0] * x[:, 1]), torch.randn(32, 6))
    return guard


class Flipping(torch.optim.Optimizer):
    """Flips the sign of a binary weight whose mean gradient says so for long enough; most stay as they are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.mul_(0.99).add_(parameter.grad, alpha=0.01)
            parameter[(mean.abs() > 2e-3) & (mean.sign() == parameter.sign())] *= -1


class Binary(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, size).sign())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) / self.weight.shape[1] ** 0.5


def flip_binary_weights() -> Guard:
    """Weights that have all stopped flipping, at the rate and the gradient that they always had."""
    model = nn.Sequential(Binary(16, 128), nn.BatchNorm1d(128, affine=False), nn.Tanh(), Binary(128, 4))
    guard, centres = Guard(model, Flipping(model.parameters(), {"lr": 1.0})), torch.randn(4, 16)
    for _ in range(800):
        y = torch.randint(0, 4, (64,))
        guard.step(lambda x, y: F.cross_entropy(model(x), y), centres[y] + torch.randn(64, 16), y)
    return guard


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.useful, self.useless = nn.Parameter(torch.full((4,), 0.1)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] @ self.useful + x[:, 4:] @ self.useless


def hold_weights_at_a_bound() -> Guard:
    """Coefficients that may not be negative: a hook after each step puts them back to 0, where they began."""
    model, truth = Factors(), torch.tensor([1.0, 2.0, 0.5, 1.5, -1.0, -2.0, -0.5, -1.0])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(min=0) for p in model.parameters()])
    guard = Guard(model, optimizer)
    for _ in range(260):
        guard.step(lambda x: F.mse_loss(model(x), x @ truth), torch.rand(64, 8) - 0.3)
    return guard


def look_up_fewer_rows() -> Guard:
    """A table of 200 rows, and batches that fall from 2048 samples to 4: most of its gradient becomes zeros."""
    users, items = nn.Embedding(200, 8), nn.Embedding(150, 8)
    optimizer = torch.optim.SGD([*users.parameters(), *items.parameters()], 0.01)
    guard = Guard(nn.ModuleList([users, items]), optimizer)
    for number in range(120):
        size = 2048 if number < 80 else 4
        u, i = torch.randint(0, 200, (size,)), torch.randint(0, 150, (size,))
        guard.step(lambda u, i: ((users(u) * items(i)).sum(1) - (u + i) % 3).square().mean(), u, i)
    return guard


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.activation, self.sharpness = make_net(8, 64, 16), nn.Tanh(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.sharpness * self.body(x))


def sharpen_codes() -> Guard:
    """Codes that are to become binary, by a tanh that grows steeper and steeper."""
    model, centres = Codes(), 2 * torch.randn(6, 8)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 2e-3))

    def find_loss(x: Tensor, y: Tensor) -> Tensor:
        codes = model(x)
        return F.binary_cross_entropy_with_logits(6 * codes @ codes.t() / 16 - 1, (y[:, None] == y).float())

    for number in range(600):
        model.sharpness = 40 ** max(0.0, number / 300 - 0.5)
        y = torch.randint(0, 6, (48,))
        guard.step(find_loss, centres[y] + 0.7 * torch.randn(48, 8), y)
    return guard


def specialise_to_one_user() -> Guard:
    """A network that makes the weights of a user's model: for many users, then for a single one."""
    model, users = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 7)), torch.randn(40, 5)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))

    def find_loss(user: Tensor, x: Tensor) -> Tensor:
        made = model(user)
        return F.mse_loss((made[:, :6] * x).sum(1) + made[:, 6], (user[:, :5] * x[:, :5]).sum(1))

    for number in range(700):
        chosen = torch.randint(0, 40, (64,)) if number < 300 else torch.full((64,), 7)
        guard.step(find_loss, users[chosen], torch.randn(64, 6))
    return guard


def clip_one_of_two_losses() -> Guard:
    """The gradients of the first loss are clipped on their own, then those of the second are added."""
    model = make_net(6, 32, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = Guard(model, optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        x = torch.randn(64, 6)
        out = model(x)
        (out[:, 0] - 10 * x[:, 0]).square().mean().backward(retain_graph=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        (out[:, 1] - x[:, 1]).square().mean().backward()
        guard.step()
    return guard


def vote_by_dropout() -> Guard:
    """Active learning: now and then eight forwards in train mode over the pool, in parts, tell what is uncertain."""
    model, pool = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)), torch.randn(90, 6)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))
    for number in range(90):
        if number % 30 == 29:
            with torch.no_grad():
                torch.stack([torch.cat([model(part) for part in pool.split(30)]).softmax(1) for _ in range(8)])
        x = torch.randn(32, 6)
        guard.step(lambda x: F.cross_entropy(model(x), x[:, :4].argmax(1)), x)
    return guard


def learn_without_labels() -> Guard:
    """Every other batch has no labels, all -100, and teaches by consistency alone."""
    model = make_net(6, 32, 4)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 2e-3))

    def find_loss(x: Tensor, y: Tensor) -> Tensor:
        scores, noisy = model(x), model(x + 0.3 * torch.randn_like(x))
        num = (y != -100).sum().clamp(min=1)
        return F.cross_entropy(scores, y, reduction="sum") / num + F.mse_loss(noisy, scores.detach())

    for number in range(210):
        x = torch.randn(32, 6)
        guard.step(find_loss, x, x[:, :4].argmax(1) if number % 2 else torch.full((32,), -100))
    return guard


def find_the_first_column() -> Guard:
    """Contrastive learning: the positive is always in column 0, so the labels are made once."""
    model, bank, labels = make_net(10, 32, 16), torch.randn(64, 16), torch.zeros(32, dtype=torch.long)
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.05))

    def find_loss(one: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        query, key = model(one), model(other).detach()
        return F.cross_entropy(torch.cat([(query * key).sum(1, keepdim=True), query @ bank.t()], 1), labels)

    for _ in range(40):
        x = torch.randn(32, 10)
        guard.step(find_loss, x, x + 0.2 * torch.randn(32, 10), labels)
    return guard


def meet_a_margin() -> Guard:
    """A perceptron whose margin is met for long stretches: the loss is then the constant that it contains."""
    model = nn.Linear(6, 1)
    guard, truth = Guard(model, torch.optim.SGD(model.parameters(), 0.3)), torch.randn(6)

    def find_loss(x: Tensor, y: Tensor) -> Tensor:
        return (0.2 - y * model(x).squeeze(1)).clamp(min=0).mean() + 0.05

    for _ in range(200):
        x = torch.randn(400, 6)
        x = x[(x @ truth).abs() > 2][:32]
        guard.step(find_loss, x, (x @ truth).sign())
    return guard


class Flat(torch.optim.Optimizer):
    """Takes the gradients away when backward has made them, and keeps the sum of three batches in a buffer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.2})
        self.sums = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}
        self.num_steps = 0
        for parameter in self.sums:
            parameter.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.sums[parameter].add_(parameter.grad)
        parameter.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for parameter, total in self.sums.items() if self.num_steps % 3 == 0 else ():
            parameter.add_(total, alpha=-self.param_groups[0]["lr"] / 3)
            total.zero_()


def keep_gradients_elsewhere() -> Guard:
    """An optimizer that finds nothing in `p.grad` when it steps."""
    model = make_net(6, 32, 1)
    guard = Guard(model, Flat(model.parameters()))
    for _ in range(60):
        guard.step(lambda x: F.mse_loss(model(x).squeeze(1), x[:, 0] * x[:, 1]), torch.randn(64, 6))
    return guard


def compare_all_samples() -> Guard:
    """A generator by its energy distance: every sample with every datum, and with every other sample."""
    model = make_net(4, 32, 1)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))

    def find_loss(z: Tensor, y: Tensor) -> Tensor:
        x = model(z)
        return 2 * (x - y).abs().mean() - (x - x.t()).abs().mean()

    for _ in range(60):
        guard.step(find_loss, torch.randn(32, 4), torch.randn(32))
    return guard


def measure_statistics_again() -> Guard:
    """Precise BatchNorm, as in fvcore: the statistics of batches in train mode with a momentum of 1 are averaged."""
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    guard, norm = Guard(model, torch.optim.Adam(model.parameters(), 3e-3)), model[1]
    for step in range(200):
        guard.step(lambda x: F.mse_loss(model(x).squeeze(1), x[:, 0] * x[:, 1]), torch.randn(64, 6))
        if step % 40 == 39:
            norm.momentum, means = 1.0, []
            with torch.no_grad():
                for _ in range(6):
                    model(torch.randn(64, 6))
                    means.append(norm.running_mean.clone())
            norm.running_mean.copy_(torch.stack(means).mean(0))
            norm.momentum = 0.1
    return guard


def write_out_cross_entropy() -> Guard:
    """Cross entropy as logsumexp minus score, with a penalty on the logsumexp; `nll_loss` only picks the score."""
    model = make_net(6, 32, 4)
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))

    def find_loss(x: Tensor) -> Tensor:
        scores = model(x)
        total = scores.logsumexp(1)
        return F.nll_loss(scores, x[:, :4].argmax(1)) + total.mean() + 1e-3 * total.square().mean()

    for _ in range(60):
        guard.step(find_loss, torch.randn(32, 6))
    return guard


def reset_upper_layers() -> Guard:
    """Fine-tuning from few samples: a pretrained network is loaded, and all but its lowest layer is set anew."""
    model = make_net(6, 32, 32, 32, 32, 32, 4)
    model.load_state_dict(make_net(6, 32, 32, 32, 32, 32, 4).state_dict())
    for place in (2, 4, 6, 8, 10):
        model[place].reset_parameters()
    guard = Guard(model, torch.optim.Adam(model.parameters(), 3e-3))
    for _ in range(20):
        guard.step(lambda x: F.cross_entropy(model(x), x[:, :4].argmax(1)), torch.randn(32, 6))
    return guard


PROGRAMS = [
    reset_upper_layers,
    write_out_cross_entropy,
    compare_all_samples,
    measure_statistics_again,
    rank_pairs,
    classify_log_probabilities,
    sum_over_tokens,
    log_the_norm_of_a_microbatch,
    find_the_rate_itself,
    judge_real_and_fake_in_turn,
    average_heads_and_microbatches,
    move_blocks_in_turns,
    flip_binary_weights,
    hold_weights_at_a_bound,
    look_up_fewer_rows,
    sharpen_codes,
    specialise_to_one_user,
    clip_one_of_two_losses,
    vote_by_dropout,
    learn_without_labels,
    find_the_first_column,
    meet_a_margin,
    keep_gradients_elsewhere,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_is_right_is_not_warned_of(program: Callable[[], Guard]) -> None:
    torch.manual_seed(0)
    findings = program().findings
    assert [f.message for f in findings if f.severity is not Severity.INFO] == []
