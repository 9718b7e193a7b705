"""Public cases that are finite in forward, or hidden there, and break the gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import Training, adam, case, classes, mse, points, sgd, stack

INF = math.inf
BAD_GRADIENT = "nonfinite_gradient"


@case("nan", phase="backward", ops="sqrt", module="rot", step=5, guarded=BAD_GRADIENT, seen="kornia/kornia#2924")
def axis_angle_sqrt_zero() -> Training:
    class Rotation(nn.Module):
        def forward(self, vector: Tensor, point: Tensor) -> Tensor:
            squared = (vector * vector).sum(-1, keepdim=True)
            angle = torch.sqrt(squared)  # culprit
            axis = vector / (angle + 1e-6)
            along = axis * (axis * point).sum(-1, keepdim=True)
            return angle.cos() * point + angle.sin() * torch.linalg.cross(axis, point) + (1 - angle.cos()) * along

    class Pose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.rot = nn.Linear(8, 3, bias=False), Rotation()

        def forward(self, x: Tensor, point: Tensor) -> Tensor:
            return self.rot(self.fc(x), point)

    batches = [(torch.randn(6, 8), torch.randn(6, 3), torch.randn(6, 3)) for _ in range(8)]
    batches[5][0][2] = 0.0
    return Training(Pose(), batches, lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


@case("nan", phase="backward", ops="acos", module="log", guarded=BAD_GRADIENT, seen="kornia/kornia#4228")
def quaternion_log_acos_identity() -> Training:
    class Log(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            real, rest = q[..., :1].clamp(-1.0, 1.0), q[..., 1:]
            length = rest.norm(dim=-1, keepdim=True).clamp(min=1e-8)
            return 2 * rest * torch.acos(real) / length  # culprit

    class Pose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.log = nn.Parameter(torch.eye(4)[:1].repeat(3, 1)), Log()

        def forward(self) -> Tensor:
            return self.log(self.q)

    model = Pose()
    batches = [0.3 * torch.randn(3, 3) for _ in range(4)]
    return Training(model, batches, lambda m, b: F.mse_loss(m(), b), optimizer=adam(model, 0.02))


@case("nan", ops="div", module="pool", step=2, guarded=BAD_GRADIENT, seen="pytorch/pytorch#36923")
def where_masked_mean_empty_row() -> Training:
    class Pool(nn.Module):
        def forward(self, h: Tensor, mask: Tensor) -> Tensor:
            count = mask.sum(1, keepdim=True)
            mean = (h * mask[..., None]).sum(1) / count  # culprit
            return torch.where(count > 0, mean, torch.zeros_like(mean))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.pool, self.out = nn.Embedding(20, 8), Pool(), nn.Linear(8, 3)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.out(self.pool(self.emb(ids), mask))

    batches = [(torch.randint(20, (6, 5)), torch.ones(6, 5), torch.randint(3, (6,))) for _ in range(5)]
    batches[2][1][4] = 0.0
    return Training(Net(), batches, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


@case("nan", phase="backward", ops="pow", step=3, guarded=BAD_GRADIENT, seen="kornia/kornia#918")
def focal_pow_gamma_half() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        p = m(batch[0]).sigmoid()
        right = torch.where(batch[1] > 0.5, p, 1 - p)
        weight = torch.pow(1 - right, 0.5)  # culprit
        return -(weight * right.clamp(min=1e-6).log()).mean()

    batches = [(x, (x.sum(-1, keepdim=True) > 0).float()) for x in torch.randn(5, 16, 8)]
    batches[3][0].mul_(1000.0)
    return Training(stack(8, 16, 1), batches, loss)


@case("nan inf", phase="backward", ops="sqrt", step=2, guarded=BAD_GRADIENT, seen="pytorch/audio#993")
def stft_magnitude_sqrt() -> Training:
    class Enhancer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 5, padding=2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x[:, None])[:, 0]

    window = torch.hann_window(32)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        parts = torch.view_as_real(torch.stft(m(batch[0]), 32, window=window, return_complex=True))
        size = parts.square().sum(-1).sqrt()  # culprit
        return F.l1_loss(size, batch[1])

    batches = []
    for _ in range(4):
        wave = torch.randn(2, 128)
        target = torch.stft(wave, 32, window=window, return_complex=True).abs()
        batches.append((wave + 0.1 * torch.randn(2, 128), target))
    batches[2][0][1] = 0.0
    return Training(Enhancer(), batches, loss)


@case("nan inf", phase="backward", ops="_linalg_eigh", module="white", step=2, guarded=BAD_GRADIENT)
def eigh_zca_degenerate() -> Training:
    class Whitening(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(0)
            values, vectors = torch.linalg.eigh(centred.T @ centred / len(x) + 1e-3 * torch.eye(x.shape[1]))  # culprit
            return centred @ vectors @ values.rsqrt().diag() @ vectors.T

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.white, self.fc2 = nn.Linear(5, 4), Whitening(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.white(self.fc1(x)))

    batches = points(4, size=16, width=5)
    batches[2][0].zero_()
    return Training(Net(), batches, mse)


@case("nan", phase="backward", ops="xlogy", step=2, guarded=BAD_GRADIENT, seen="pytorch/pytorch#89558")
def kl_target_not_detached() -> Training:
    model = nn.ModuleDict({"a": stack(6, 16, 4), "b": stack(6, 16, 4)})

    def loss(m: Any, batch: Any) -> Tensor:
        first, second = m["a"](batch[0]), m["b"](batch[0])
        mutual = F.kl_div(second.log_softmax(-1), first.softmax(-1), reduction="batchmean")  # culprit
        return F.cross_entropy(first, batch[1]) + F.cross_entropy(second, batch[1]) + mutual

    batches = classes(4, width=6)
    batches[2][0].mul_(400.0)
    return Training(model, batches, loss, optimizer=sgd(model, 1e-3))


@case("nan inf", phase="backward", ops="sqrt", module="margin", step=2, guarded=BAD_GRADIENT)
def arcface_sine_sqrt() -> Training:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.eye(3, 6), requires_grad=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            cosine = F.normalize(x) @ self.centres.T
            sine = torch.sqrt((1 - cosine.square()).clamp(0, 1))  # culprit
            moved = cosine * math.cos(0.3) - sine * math.sin(0.3)
            return 8.0 * torch.where(F.one_hot(y, 3).bool(), moved, cosine)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.margin = nn.Parameter(torch.ones(6)), Margin()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.margin(x * self.scale, y)

    model = Net()
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)]
    batches[2][0][1] = 2.0 * torch.eye(6)[1]
    batches[2][1][1] = 1
    optimizer = torch.optim.SGD([model.scale], lr=1e-3)
    return Training(model, batches, lambda m, b: F.cross_entropy(m(*b), b[1]), optimizer=optimizer)


@case("nan", ops="_log_softmax", step=2, guarded=BAD_GRADIENT)
def ce_ignored_rows_all_neginf() -> Training:
    model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        ids, labels, allowed = batch
        logits = m(ids) + torch.zeros(allowed.shape).masked_fill(~allowed, -INF)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)  # culprit

    batches = []
    for step in range(4):
        ids = torch.randint(11, (3, 5))
        labels, allowed = ids.clone(), torch.ones(3, 5, 12, dtype=torch.bool)
        allowed[..., 11] = False
        if step == 2:
            allowed[1, 3:], labels[1, 3:] = False, -1
        batches.append((ids, labels, allowed))
    return Training(model, batches, loss, optimizer=adam(model, 1e-2))


@case("nan", ops="_softmax", module="attn", step=2, guarded=BAD_GRADIENT, seen="pytorch/pytorch#41508")
def mha_fully_masked_sample() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.out = nn.Linear(6, 8), nn.Linear(8, 1)
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            h = self.emb(x)
            mixed, _ = self.attn(h, h, h, key_padding_mask=padding)  # culprit
            return self.out(mixed[:, 0])[:, 0]

    def loss(m: nn.Module, batch: Any) -> Tensor:
        x, padding, y = batch
        used = ~padding.all(1)
        return F.mse_loss(m(x, padding)[used], y[used])

    model = Net()
    batches = [(torch.randn(4, 5, 6), torch.zeros(4, 5, dtype=torch.bool), torch.randn(4)) for _ in range(4)]
    batches[2][1][2] = True
    return Training(model, batches, loss, optimizer=adam(model))


@case("inf", ops="add _softmax", module="attn", step=2, guarded=BAD_GRADIENT, seen="NVIDIA-NeMo/Automodel#2658")
def bf16_double_mask_overflow() -> Training:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, document: Tensor) -> Tensor:
            least = torch.finfo(torch.bfloat16).min
            n, t = document.shape
            empty = torch.zeros(n, t, t, dtype=torch.bfloat16)
            foreign = (document[:, :, None] != document[:, None]) | (document[:, :, None] < 0)
            padding = (document < 0)[:, None]
            mask = empty.masked_fill(foreign, least) + empty.masked_fill(padding, least)  # culprit
            scores = (self.q(x) @ self.k(x).mT).bfloat16() / 8**0.5 + mask
            return scores.float().softmax(-1) @ self.v(x)  # culprit too

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.attn, self.out = nn.Embedding(20, 8), Attention(), nn.Linear(8, 20)

        def forward(self, ids: Tensor, document: Tensor) -> Tensor:
            return self.out(self.attn(self.emb(ids), document))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        ids, document = batch
        return F.cross_entropy(m(ids, document).flatten(0, 1), ids.masked_fill(document < 0, -100).flatten())

    model = Net()
    batches = [(torch.randint(20, (3, 6)), torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)) for _ in range(4)]
    batches[2][1][2] = -1
    return Training(model, batches, loss, optimizer=adam(model))


@case(
    "nan", phase="input", ops="input", step=2, guarded=f"{BAD_GRADIENT} nonfinite_input", seen="pytorch/pytorch#89543"
)
def data_nan_target_masked_late() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        error = (m(batch[0]) - batch[1]).pow(2)  # culprit
        return torch.where(batch[1].isnan(), torch.zeros_like(error), error).mean()

    batches = points(4, out=3)
    batches[2][1][5, 0] = math.nan
    return Training(stack(8, 16, 3), batches, loss)
