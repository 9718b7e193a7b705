"""Our own cases: mechanisms that the public ones do not show, and suspicious but healthy controls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_case import Training, adam, case, classes, cross_entropy, mse, points, sgd, stack

INF = math.inf

# --- born in backward ------------------------------------------------------------------------------------------------


@case("nan inf", phase="backward", ops="div", step=2, guarded="nonfinite_gradient")
def custom_backward_divides_by_zero() -> Training:
    class Reciprocal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.where(x == 0, 0.0, 1 / torch.where(x == 0, 1.0, x))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return -grad / x.square()  # culprit

    model = nn.Linear(4, 3, bias=False)
    batches = points(4, width=4, out=3)
    batches[2][0][1] = 0.0
    return Training(model, batches, lambda m, b: Reciprocal.apply(m(b[0])).tanh().mean())


@case("nan", phase="backward", ops="div", step=1, guarded="nonfinite_gradient")
def hook_normalises_a_zero_gradient() -> Training:
    model = stack(4, 8, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        hidden = m[0](batch[0])
        hidden.register_hook(lambda grad: grad / grad.norm())  # culprit
        return (m[2](m[1](hidden)) * batch[1]).sum()

    batches = points(3, width=4)
    batches[1][1].zero_()
    return Training(model, batches, loss)


@case("nan", phase="backward", ops="sqrt", module="block", step=2, guarded="nonfinite_gradient")
def checkpointed_block_takes_a_root() -> Training:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            length = (h * h).sum(-1, keepdim=True).sqrt()  # culprit
            return h / (length + 1e-6)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    batches = points(4, width=6)
    batches[2][0][3] = 0.0
    return Training(Net(), batches, mse)


@case("nan", phase="backward", ops="sqrt", module="block", step=1, guarded="nonfinite_gradient")
def reentrant_checkpoint_takes_a_root() -> Training:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h / (h.square().sum(-1, keepdim=True).sqrt() + 1e-6)  # culprit

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.block, self.head = Block(), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x * self.scale, use_reentrant=True))

    batches = points(3, width=6)
    batches[1][0][0] = 0.0
    return Training(Net(), batches, mse)


@case("nan", phase="backward", ops="sqrt", guarded="nonfinite_gradient")
def gradient_penalty_at_a_flat_point() -> Training:
    critic = stack(5, 16, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        length = slope.square().sum(1).sqrt()  # culprit
        return m(batch[0]).mean() + ((length - 1) ** 2).mean()

    batches = points(3, width=5)
    with torch.no_grad():
        critic[0].bias.fill_(-0.5)
    batches[0][0][2] = 0.0  # no unit is active there
    return Training(critic, batches, loss)


@case("nan inf", phase="backward", ops="acos", step=1, guarded="nonfinite_gradient")
def angle_between_equal_vectors() -> Training:
    model = nn.Linear(3, 3, bias=False)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        a = F.normalize(m(batch[0]), dim=-1)
        cosine = (a * F.normalize(batch[1], dim=-1)).sum(-1).clamp(-1.0, 1.0)
        return torch.acos(cosine).mean()  # culprit

    batches = [(torch.randn(5, 3), torch.randn(5, 3)) for _ in range(3)]
    batches[1][0][2] = torch.tensor([1.0, 0.0, 0.0])
    batches[1][1][2] = torch.tensor([1.0, 0.0, 0.0])
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    return Training(model, batches, loss, optimizer=sgd(model, 0.0))


@case("nan", phase="backward", ops="pow", module="gamma", step=0, guarded="nonfinite_gradient")
def learned_exponent_of_a_black_pixel() -> Training:
    class Gamma(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exponent = nn.Parameter(torch.tensor(0.45))

        def forward(self, x: Tensor) -> Tensor:
            return x.abs() ** self.exponent  # culprit

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.gamma = nn.Linear(6, 6, bias=False), Gamma()

        def forward(self, x: Tensor) -> Tensor:
            return self.gamma(self.fc(x))

    batches = points(2, width=6, out=6)
    batches[0][0][1] = 0.0
    return Training(Net(), batches, mse)


@case("nan inf", phase="backward", ops="_linalg_svd linalg_svd", step=1, guarded="nonfinite_gradient")
def singular_vectors_of_equal_values() -> Training:
    model = nn.Linear(3, 9, bias=False)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        matrix = m(batch[0]).view(-1, 3, 3)
        u, _, v = torch.linalg.svd(matrix)  # culprit
        return ((u @ v) - torch.eye(3)).square().mean() + u[:, 0, 1].mean()

    batches = [(torch.randn(2, 3), None) for _ in range(3)]
    with torch.no_grad():
        model.weight[:, 0] = torch.eye(3).flatten()
    batches[1][0][0] = torch.tensor([1.0, 0.0, 0.0])
    return Training(model, batches, loss, optimizer=sgd(model, 0.0))


# --- born in forward -------------------------------------------------------------------------------------------------


@case("nan", ops="_softmax", module="heads.1", step=2, guarded="nonfinite_loss")
def mask_row_in_a_buffer() -> Training:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mask", torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -INF))

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            scores = self.fc(x) @ x.transpose(1, 2) + self.mask
            weights = scores.masked_fill(~keep[:, None], -INF).softmax(-1)  # culprit
            return weights @ x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([Head(), Head()])
            self.out = nn.Linear(4, 1)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            everything = torch.ones_like(keep)
            return self.out(self.heads[1](self.heads[0](x, everything), keep)).mean((1, 2))

    batches = [(torch.randn(3, 5, 4), torch.ones(3, 5, dtype=torch.bool), torch.randn(3)) for _ in range(4)]
    batches[2][1][1, :2] = False  # the first words are padding, and nothing before them is visible
    return Training(Net(), batches, lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


@case("nan", ops="sub", step=1, guarded="nonfinite_loss")
def softmax_by_hand_of_a_masked_row() -> Training:
    model = nn.Linear(4, 5)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        scores = m(batch[0]) + batch[1]
        shifted = scores - scores.amax(-1, keepdim=True)  # culprit
        weights = shifted.exp() / shifted.exp().sum(-1, keepdim=True)
        return (weights * torch.arange(5.0)).sum(-1).mean()

    batches = [(torch.randn(3, 4), torch.zeros(3, 5)) for _ in range(3)]
    for _, mask in batches:
        mask[:, 4] = -INF
    batches[1][1][2] = -INF  # the mask arrives in the batch
    return Training(model, batches, loss)


@case("inf", ops="exp", module="flow", step=2, guarded="nonfinite_loss")
def flow_scale_overflows() -> Training:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale(x).exp()  # culprit
            return x * scale + self.shift(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = Flow()

        def forward(self, x: Tensor) -> Tensor:
            return self.flow(x)

    batches = points(4, width=4, out=4)
    batches[2][0][1] = 900.0
    model = Net()
    return Training(model, batches, mse, optimizer=sgd(model, 1e-3))


@case("nan", phase="input", ops="input", step=1)
def batch_norm_keeps_what_the_loop_skips() -> Training:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        found = F.mse_loss(m(batch[0]), batch[1])  # culprit
        return found if torch.isfinite(found) else 0.0 * m[2].bias.sum()

    batches = points(3, width=4)
    batches[1][0][0, 0] = math.nan
    return Training(model, batches, loss)


@case("nan", ops="div_ div", module="norm", step=1, guarded="nonfinite_loss")
def normalised_in_place() -> Training:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.div_(x.detach().abs().amax(-1, keepdim=True))  # culprit
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.out = nn.Linear(4, 4, bias=False), Norm(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.fc(x)))

    batches = points(3, width=4)
    batches[1][0][5] = 0.0
    return Training(Net(), batches, mse)


@case("nan", ops="div", step=1, guarded="nonfinite_loss")
def slice_of_a_healthy_buffer() -> Training:
    """A -inf elsewhere in the tensor of a slice must not be blamed."""
    model = nn.Linear(4, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        table = torch.full((2, 8, 4), -INF)
        table[0] = m(batch[0])
        weights = batch[1]
        share = weights / weights.sum()  # culprit
        return (table[0] * share).sum()

    batches = [(torch.randn(8, 4), torch.rand(8, 1)) for _ in range(3)]
    batches[1][1].zero_()
    return Training(model, batches, loss)


@case("nan", ops="div", step=1, guarded="nonfinite_loss")
def statistic_that_leaves_torch() -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        spread = (batch[0].std() / batch[0].abs().sum()).item()  # culprit
        return (m(batch[0]) * spread - batch[1]).square().mean()

    batches = points(3, width=4)
    batches[1][0].zero_()
    return Training(model, batches, loss)


@case("inf", ops="mm addmm linear", module="proj", step=1, guarded="nonfinite_loss")
def projection_overflows_in_half() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.norm, self.out = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.proj(x)))  # culprit

    model = Net()
    with torch.no_grad():
        model.proj.weight.abs_().mul_(10)
    batches = points(3, width=16)
    batches[1][0][2] = 3e4
    return Training(model, batches, lambda m, b: F.mse_loss(m(b[0]).float(), b[1]), autocast=torch.float16)


@case("inf", ops="_to_copy", step=1, guarded="nonfinite_loss")
def target_cast_to_half() -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        target = batch[1].half()  # culprit
        return F.mse_loss(m(batch[0]), target.float())

    batches = points(3, width=4)
    batches[1][1][0] = 1e5
    return Training(model, batches, loss)


@case("nan", ops="mean", step=1, guarded="nonfinite_loss")
def mean_of_an_empty_selection() -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        error = (m(batch[0]) - batch[1]).abs()
        hard = error[error > batch[2]]
        return error.mean() + hard.mean()  # culprit

    batches = [(x, y, torch.tensor(0.01 if i != 1 else 1e3)) for i, (x, y) in enumerate(points(3, width=4))]
    return Training(model, batches, loss)


@case("inf", ops="log1p", step=1, guarded="nonfinite_loss")
def log1p_of_minus_one() -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        p = torch.sigmoid(m(batch[0]))
        return -(batch[1] * torch.log(p + 1e-8) + (1 - batch[1]) * torch.log1p(-p)).mean()  # culprit

    batches = [(torch.randn(6, 4), torch.randint(2, (6, 1)).float()) for _ in range(3)]
    batches[1][0].copy_(1e4 * model.weight.detach().sign())
    return Training(model, batches, loss)


@case("inf", ops="log", step=1, guarded="nonfinite_loss")
def entropy_of_a_sure_policy() -> Training:
    model = nn.Linear(4, 3)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        p = torch.softmax(m(batch[0]), -1)
        return (p * p.log()).sum(-1).mean()  # culprit

    batches = [(torch.randn(6, 4),) for _ in range(3)]
    batches[1][0][0] *= 1e4
    return Training(model, batches, loss)


@case("nan", phase="parameter", ops="parameter", module="body.0", guarded="nonfinite_parameter")
def weight_that_was_loaded_bad() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = stack(4, 8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # culprit

    model = Net()
    with torch.no_grad():
        model.body[0].weight[3, 1] = math.nan
    return Training(model, points(2, width=4), mse)


@case("nan inf", phase="parameter", ops="parameter", module="norm", guarded="nonfinite_loss")
def buffer_that_was_loaded_bad() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 1), nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))  # culprit

    model = Net()
    model.norm.running_mean.fill_(math.nan)
    model.norm.eval()
    return Training(model, points(2, width=4), mse)


def distil(teacher: nn.Module) -> Training:
    teacher.requires_grad_(False).eval()

    def loss(m: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0])  # culprit
        return F.mse_loss(m(batch[0]), target)

    return Training(nn.Linear(4, 2), points(3, width=4), loss)


def normalise_in_numpy(batches: list[Any]) -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        rows = batch[0].numpy()
        with np.errstate(all="ignore"):
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return F.mse_loss(m(torch.from_numpy(rows)), batch[1])

    return Training(model, batches, loss)


@case("nan", ops="lift_fresh", step=1, guarded="nonfinite_loss")
def features_normalised_in_numpy() -> Training:
    batches = points(3, width=4)
    batches[1][0][2] = 0.0
    return normalise_in_numpy(batches)


@case()
def fine_features_from_numpy() -> Training:
    return normalise_in_numpy(points(3, width=4))


def divide_in_numpy(batches: list[Any]) -> Training:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, size: Tensor) -> Tensor:
            ctx.save_for_backward(size)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            with np.errstate(all="ignore"):
                return torch.from_numpy(grad.numpy() / ctx.saved_tensors[0].numpy()), None

    model = nn.Linear(4, 1)
    return Training(model, batches, lambda m, b: (Scaled.apply(m(b[0]), b[1]) * torch.ones(8, 1)).mean())


@case("nan inf", phase="backward", ops="lift_fresh", step=1, guarded="nonfinite_gradient")
def custom_backward_in_numpy() -> Training:
    batches = [(torch.randn(8, 4), torch.rand(8, 1) + 1) for _ in range(3)]
    batches[1][1][:2] = 0.0
    return divide_in_numpy(batches)


@case()
def fine_custom_backward_in_numpy() -> Training:
    return divide_in_numpy([(torch.randn(8, 4), torch.rand(8, 1) + 1) for _ in range(3)])


def penalise_by_transform(batches: list[Any], bias: float) -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        def length(weights: dict[str, Tensor]) -> Tensor:
            return (torch.func.functional_call(m, weights, (batch[0],)).square() + bias).sqrt().sum()

        slopes = torch.func.grad(length)(dict(m.named_parameters()))
        return F.mse_loss(m(batch[0]), batch[1]) + 0.01 * slopes["weight"].square().sum()

    with torch.no_grad():
        model.bias.zero_()
    return Training(model, batches, loss, optimizer=sgd(model, 0.0))


@case("nan", phase="backward", ops="sqrt", step=1, guarded="nonfinite_loss")
def root_inside_of_a_transform() -> Training:
    batches = points(3, width=4)
    batches[1][0][2] = 0.0
    return penalise_by_transform(batches, 0.0)


@case()
def fine_root_inside_of_a_transform() -> Training:
    batches = points(3, width=4)
    batches[1][0][2] = 0.0
    return penalise_by_transform(batches, 1e-6)


def scale_by_python_number(batches: list[Any]) -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        num = batch[2].sum().item()
        scale = 1.0 / num if num else INF
        return ((m(batch[0]) - batch[1]).square() * batch[2]).sum() * scale

    return Training(model, batches, loss)


@case("nan", ops="mul", step=1, guarded="nonfinite_loss")
def masked_loss_scaled_by_an_infinite_number() -> Training:
    return scale_by_python_number(
        [(x, y, torch.full((8, 1), float(i != 1))) for i, (x, y) in enumerate(points(3, width=4))]
    )


@case()
def fine_masked_loss_scaled_by_a_number() -> Training:
    return scale_by_python_number([(x, y, torch.ones(8, 1)) for x, y in points(3, width=4)])


@case("nan", phase="parameter", ops="parameter", guarded="nonfinite_loss")
def teacher_that_was_loaded_bad() -> Training:
    teacher = stack(4, 8, 2)
    with torch.no_grad():
        teacher[2].bias[1] = math.nan
    return distil(teacher)


@case()
def fine_teacher() -> Training:
    return distil(stack(4, 8, 2))


@case("nan", phase="input", ops="input", step=1, guarded="nonfinite_loss")
def nested_batch_with_a_hole() -> Training:
    model = stack(4, 8, 1)

    def loss(m: nn.Module, batch: Any) -> dict[str, Tensor]:
        features = batch["views"]["left"] + batch["views"]["right"]  # culprit
        return {"loss": F.mse_loss(m(features), batch["y"])}

    batches = []
    for _ in range(3):
        views = {"left": torch.randn(5, 4), "right": torch.randn(5, 4)}
        batches.append({"views": views, "y": torch.randn(5, 1)})
    batches[1]["views"]["right"][4, 0] = math.nan
    return Training(model, batches, loss)


@case("nan", ops="div", step=1, guarded="nonfinite_loss")
def one_of_three_terms() -> Training:
    model = stack(4, 8, 2)

    def loss(m: nn.Module, batch: Any) -> dict[str, Tensor]:
        out = m(batch[0])
        fit = F.mse_loss(out[:, :1], batch[1])
        size = out.square().mean()
        masked = (out * batch[2]).sum() / batch[2].sum()  # culprit
        return {"loss": fit + 0.1 * size + masked, "fit": fit, "size": size, "masked": masked}

    batches = [(x, y, torch.ones(8, 1)) for x, y in points(3, width=4)]
    batches[1][2].zero_()
    return Training(model, batches, loss)


@case("nan", ops="lift_fresh mul", step=0, guarded="nonfinite_loss")
def constant_that_is_no_number() -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        prior = torch.tensor(float("nan"))  # culprit
        return F.mse_loss(m(batch[0]), batch[1]) + 0.0 * prior

    return Training(model, points(2, width=4), loss)


@case("inf", ops="nll_loss_forward", step=1, guarded="nonfinite_loss")
def label_behind_the_vocabulary_mask() -> Training:
    model = nn.Linear(4, 6)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logits = m(batch[0]).masked_fill(batch[2], -INF)
        return F.cross_entropy(logits, batch[1])  # culprit

    banned = torch.tensor([False, False, False, False, True, True])
    batches = [(torch.randn(5, 4), torch.randint(4, (5,)), banned) for _ in range(3)]
    batches[1][1][3] = 5
    return Training(model, batches, loss)


@case("nan", ops="var", step=1, guarded="nonfinite_loss")
def variance_of_one_step_sequence() -> Training:
    model = nn.GRU(3, 4, batch_first=True)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        out, _ = m(batch[0])
        return out.mean() + out.var(dim=1).mean()  # culprit

    batches = [(torch.randn(4, 1 if i == 1 else 5, 3),) for i in range(3)]
    return Training(model, batches, loss)


@case("error", ops="embedding", module="emb", step=1)
def token_outside_of_the_table() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.out = nn.Embedding(10, 4), nn.Linear(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.emb(ids)).mean()  # culprit

    batches = [torch.randint(10, (3, 5)) for _ in range(3)]
    batches[1][2, 2] = 10
    return Training(Net(), batches, lambda m, b: m(b))


@case("inf nan", ops="log", step=1)
def loss_that_the_program_refuses() -> Training:
    model = nn.Linear(4, 1)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        found = torch.log(m(batch[0]).square() * batch[1]).mean()  # culprit
        if not torch.isfinite(found):
            raise FloatingPointError("the loss is not finite")
        return found

    batches = [(torch.randn(5, 4), torch.ones(5, 1)) for _ in range(3)]
    batches[1][1][2] = 0.0
    return Training(model, batches, loss)


# --- finite but wrong ------------------------------------------------------------------------------------------------


@case("exploding", module="layers.0")
def residual_stack_without_norm() -> Training:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 24)
            nn.init.normal_(self.fc.weight, std=0.45)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.fc(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[Layer() for _ in range(18)])
            self.out = nn.Linear(24, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layers(x))  # culprit

    return Training(Net(), points(2, width=24), mse)


@case("vanishing", phase="backward", module="0", guarded="vanishing_gradient")
def narrow_tanh_stack() -> Training:
    model = stack(6, *[12] * 14, 1, activation=nn.Tanh)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(0.4)
    return Training(model, points(2, width=6), mse)


@case("dead", module="1")
def units_below_zero() -> Training:
    model = stack(6, 32, 1)
    with torch.no_grad():
        model[0].bias.fill_(-9.0)
    return Training(model, points(2, width=6, size=16), mse)


# --- born in the optimizer -------------------------------------------------------------------------------------------


@case(
    "nan",
    phase="optimizer",
    ops="addcdiv addcdiv_ div _foreach_div _foreach_div_ _foreach_addcdiv_ div_",
    step=0,
    guarded="underflowing_epsilon nonfinite_parameter",
)
def adam_epsilon_in_half() -> Training:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 1)).half()
    batches = [torch.tensor([[0, 1], [1, 2]]) for _ in range(2)]
    return Training(model, batches, lambda m, b: m(b).float().square().mean(), optimizer=adam(model))


# --- controls --------------------------------------------------------------------------------------------------------


@case()
def fine_causal_mask() -> Training:
    model = nn.Linear(4, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        scores = m(batch[0]) @ batch[0].transpose(1, 2)
        mask = torch.full((5, 5), -INF).triu(1)
        return ((scores + mask).softmax(-1) @ batch[0]).square().mean()

    return Training(model, [(torch.randn(3, 5, 4),) for _ in range(4)], loss)


@case()
def fine_swallowed_by_relu() -> Training:
    """A NaN in a branch that is never used, and one that a clamp of the gradient removes."""
    model = nn.Linear(4, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        out = m(batch[0])
        unused = out.detach().log().nan_to_num(0.0)
        return out.square().mean() + 0.0 * unused.sum()

    return Training(model, points(4, width=4), loss)


@case()
def fine_workspace_from_empty() -> Training:
    model = nn.Linear(4, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        room = torch.empty(8, 8).fill_(math.nan)
        room[:, :4] = m(batch[0])
        room[:, 4:] = 1.0
        return room.square().mean()

    return Training(model, points(4, width=4), loss)


@case()
def fine_running_maximum_from_minus_inf() -> Training:
    model = nn.GRU(3, 4, batch_first=True)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        out, _ = m(batch[0])
        best = torch.full((len(out), 4), -INF)
        for t in range(out.shape[1]):
            best = torch.maximum(best, out[:, t])
        return best.square().mean()

    return Training(model, [(torch.randn(4, 5, 3),) for _ in range(4)], loss)


@case()
def fine_beam_scores() -> Training:
    model = nn.Linear(4, 6)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logp = m(batch[0]).log_softmax(-1)
        banned = torch.zeros(6, dtype=torch.bool)
        banned[0] = True
        best = logp.masked_fill(banned, -INF).topk(2, -1).values
        return -best.mean()

    return Training(model, points(4, width=4), loss)


@case()
def fine_ctc() -> Training:
    model = nn.Linear(6, 5)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logp = m(batch[0]).log_softmax(-1).transpose(0, 1)
        n, t = batch[0].shape[:2]
        return F.ctc_loss(logp, batch[1], torch.full((n,), t), torch.full((n,), 2))

    return Training(model, [(torch.randn(3, 7, 6), torch.randint(1, 5, (3, 2))) for _ in range(4)], loss)


@case()
def fine_dropout_and_batch_norm() -> Training:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    return Training(model, classes(6), cross_entropy, optimizer=adam(model, 1e-2))


@case()
def fine_satisfied_hinge() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.relu = nn.Linear(4, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(1 - self.fc(x) * 0 - 5) + 0.01 * self.fc(x).square()

    return Training(Net(), points(4, width=4), mse)


@case()
def fine_weights_renormalised_in_place() -> Training:
    model = nn.Linear(4, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            m.weight.div_(m.weight.norm(dim=1, keepdim=True))
        return F.mse_loss(m(batch[0]), batch[1])

    return Training(model, points(4, width=4, out=4), loss)
