"""Parts that get no gradient because of an op that has none, and parts that need none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


class Parts(nn.Module):
    """A small first part, a larger second one, and what `join` makes of them."""

    def __init__(self, join: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.embedding, self.second = nn.Linear(8, 8), nn.Embedding(8, 32), mlp(32, 32, 4)
        self.widen, self.join = nn.Linear(8, 32), join

    def forward(self, x: Tensor) -> Any:
        return self.join(self, x)


def _train(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] | None = None, num: int = 20) -> Built:
    def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def train(guard: Any) -> None:
        for x, y in clusters(num):
            guard.step(loss or cross_entropy, x, y)

    return model, adam(model), train


@case("missing_gradient", "an embedding of the argmax: what chooses is never trained")
def behind_argmax(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        scores = parts.first(x)
        chosen = parts.embedding(scores.argmax(1)) if bug else scores.softmax(1) @ parts.embedding.weight
        return parts.second(chosen + parts.widen(x))

    return _train(Parts(join))


@case("missing_gradient", "a gate that is a comparison")
def behind_comparison(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        gate = parts.first(x).sigmoid()
        gate = (gate > 0.5).float() if bug else gate
        return parts.second(parts.widen(x * gate) + parts.embedding.weight.mean(0))

    return _train(Parts(join))


@case("missing_gradient", "a latent that is drawn by sample() where rsample() was meant")
def behind_sample(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        mean, scale = parts.first(x).repeat(1, 2).chunk(2, 1)
        latent = torch.distributions.Normal(mean, scale.exp())
        return parts.second(parts.widen(latent.sample() if bug else latent.rsample()) + parts.embedding.weight.mean(0))

    return _train(Parts(join))


# --- nothing to find --------------------------------------------------------------------------------------------------


@case(None, "a straight-through gate: hard forward, soft backward")
def straight_through(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        gate = parts.first(x).sigmoid()
        gate = gate + ((gate > 0.5).float() - gate).detach()
        return parts.second(parts.widen(x * gate) + parts.embedding.weight.mean(0))

    return _train(Parts(join))


@case(None, "REINFORCE: what is drawn has a gradient by its probability")
def score_function(bug: bool) -> Built:
    model = Parts(lambda parts, x: parts.first(x))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        value = model.second(model.embedding(action) + model.widen(x)).mean(1)
        return -(policy.log_prob(action) * (action == y).float()).mean() + (value - y).square().mean()

    return _train(model, loss)


@case(None, "an unused part whose argmax is only counted")
def counted_only(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        parts.num_chosen = parts.first(x).argmax(1).bincount()
        return parts.second(parts.widen(x) + parts.embedding.weight.mean(0))

    return _train(Parts(join))


@case(None, "a part is cut off by detach(), as for a probe")
def detached_on_purpose(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        return parts.second(parts.widen(parts.first(x).detach()) + parts.embedding.weight.mean(0))

    return _train(Parts(join))


@case(None, "classes come from a part that was trained before and is not frozen by name")
def trained_before(bug: bool) -> Built:
    def join(parts: Parts, x: Tensor) -> Tensor:
        return parts.second(parts.embedding(parts.first(x).argmax(1)) + parts.widen(x))

    model = Parts(join)
    with torch.no_grad():
        model.first.weight.mul_(3.0)
    return _train(model)


@case(None, "labels are the codes of a random projection, which is never trained")
def random_codes(bug: bool) -> Built:
    model = Parts(lambda parts, x: parts.second(parts.widen(x) + parts.embedding.weight.mean(0)))
    return _train(model, lambda x, y: F.cross_entropy(model(x), model.first(x)[:, :4].argmax(1)))


@case(None, "pseudo-labels by a teacher inside the model, which follows the student")
def teacher_inside(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.first = mlp(8, 16, 4), nn.Linear(8, 8)
            self.teacher = copy.deepcopy(self.student)

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.student(self.first(x)), self.teacher(x).argmax(1))

    model = Net()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.1)
        return F.cross_entropy(model.student(model.first(x)), y) + model(x)

    return _train(model, loss)


@case(None, "a teacher as large as the student, which follows it; the optimizer holds both")
def teacher_of_half_the_model(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = mlp(8, 16, 4)
            self.teacher = copy.deepcopy(self.student)

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.student(x), self.teacher(x).argmax(1))

    model = Net()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        for own, other in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        return F.cross_entropy(model.student(x), y) + model(x)

    return _train(model, loss)
