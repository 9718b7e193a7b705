"""Public cases with a nonfinite loss: from forward, from half precision, or from the input."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import ROOT, Training, case, classes, mse, points, sgd, stack

BAD_LOSS = "nonfinite_loss"


@case("nan", ops="std", step=2, guarded=BAD_LOSS, seen="DLR-RM/stable-baselines3#325")
def ppo_advantage_std_single() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        seen, action, advantage = batch
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # culprit
        ratio = (m(seen).log_softmax(-1).gather(1, action[:, None])[:, 0] + math.log(3)).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    everything = torch.randn(17, 6), torch.randint(3, (17,)), torch.randn(17)
    batches = [tuple(part[i : i + 8] for part in everything) for i in (0, 8, 16)]
    return Training(stack(6, 32, 3, activation=nn.Tanh), batches, loss, clip=0.5)


@case("nan", ops="_weight_norm_interface", module="out.parametrizations.weight.0", guarded=BAD_LOSS)
def weight_norm_zero_init() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 1)
            nn.init.zeros_(self.out.weight)
            nn.utils.parametrizations.weight_norm(self.out)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc(x).relu())  # culprit

    return Training(Net(), points(3), mse)


@case("nan", ops="div", module="norm", step=2, guarded=BAD_LOSS, seen="pytorch/pytorch#32137")
def normalize_fp16_zero_row() -> Training:
    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(x, dim=-1)  # culprit

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.out = nn.Linear(8, 16, bias=False), Unit(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.fc(x)))

    batches = [(x.half(), y) for x, y in classes(4)]
    batches[2][0][5] = 0.0
    return Training(Net().half(), batches, lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]))


@case("inf", ops="_ctc_loss", step=2, guarded=BAD_LOSS, seen="pytorch/pytorch#31557")
def ctc_infeasible_alignment() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        frames, letters = torch.full((len(x),), x.shape[1]), torch.full((len(y),), y.shape[1])
        return F.ctc_loss(m(x).log_softmax(-1).transpose(0, 1), y, frames, letters)  # culprit

    batches = [(torch.randn(4, 4, 6), torch.tensor([[1, 2, 3]] * 4)) for _ in range(4)]
    batches[2][1][2] = 2
    return Training(stack(6, 16, 5), batches, loss)


@case("inf", ops="reciprocal div pow", step=2, guarded=BAD_LOSS, seen="Project-MONAI/MONAI#371")
def generalized_dice_absent_class() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        p = m(batch[0]).softmax(1)
        target = F.one_hot(batch[1], 3).movedim(-1, 1).float()
        weight = 1.0 / target.sum((0, 2, 3)).square()  # culprit
        both, either = (p * target).sum((0, 2, 3)), (p + target).sum((0, 2, 3))
        return 1 - 2 * (weight * both).sum() / (weight * either).sum()

    batches = [(torch.randn(2, 1, 6, 6), torch.randint(3, (2, 6, 6))) for _ in range(4)]
    batches[2][1].clamp_(max=1)
    return Training(nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)), batches, loss)


@case("nan", ops="div", step=2, guarded=BAD_LOSS, seen="ultralytics/yolov5#8539")
def ciou_zero_box_fp16() -> Training:
    model = nn.Linear(6, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        out = m(batch[0])
        size = (out[:, 2:].sigmoid() * 2) ** 2 * 1.5
        shape = torch.atan(size[:, 0] / size[:, 1])  # culprit
        wanted = torch.atan(batch[1][:, 2] / batch[1][:, 3])
        return (out[:, :2].float() - batch[1][:, :2]).square().mean() + (wanted - shape.float()).square().mean()

    with torch.no_grad():
        model.weight[2:].abs_()
    batches = [(torch.randn(8, 6), torch.rand(8, 4) + 0.2) for _ in range(4)]
    batches[2][0][2] = -20.0
    return Training(model, batches, loss, autocast=torch.float16)


@case("inf", ops="log", step=1, guarded=BAD_LOSS, seen="pytorch/pytorch#1620")
def log_of_softmax_underflow() -> Training:
    model = nn.Linear(12, 4)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logp = torch.log(torch.softmax(m(batch[0]), -1))  # culprit
        return -(F.one_hot(batch[1], 4) * logp).sum(-1).mean()

    with torch.no_grad():
        model.weight.mul_(0.01)
    batches = [(torch.rand(16, 12), torch.randint(4, (16,))) for _ in range(3)]
    batches[1][0].mul_(255 * 100)
    return Training(model, batches, loss, optimizer=sgd(model, 5e-4))


@case("nan", ops="pow", module="conv", step=2, guarded=BAD_LOSS, seen="pyg-team/pytorch_geometric#61")
def gcn_negative_edge_weight() -> Training:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(5, 8)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            scale = edges.sum(1).pow(-0.5)  # culprit
            scale = scale.masked_fill(scale.isinf(), 0.0)[:, None]
            return scale * (edges @ (scale * self.lin(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = Convolution(), nn.Linear(8, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.out(self.conv(x, edges).relu())

    batches = [(torch.randn(8, 5), torch.rand(8, 8) + torch.eye(8), torch.randint(3, (8,))) for _ in range(4)]
    batches[2][1][3] = -0.2
    return Training(Net(), batches, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


def contrast(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return shifted similarities, the same without the diagonal, and which samples belong together."""
    similar = z @ z.T / 0.1
    others = 1 - torch.eye(len(z))
    together = (labels[:, None] == labels[None]).float() * others
    return similar - similar.amax(1, keepdim=True).detach(), others, together


@case("nan", ops="div", step=2, guarded=BAD_LOSS, seen="HobbitLong/SupContrast#141")
def supcon_no_positive_pair() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        logits, others, together = contrast(F.normalize(m(batch[0]), dim=1), batch[1])
        logp = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        return -((together * logp).sum(1) / together.sum(1)).mean()  # culprit

    batches = [(torch.randn(8, 8), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])) for _ in range(4)]
    batches[2][1][7] = 4
    return Training(stack(8, 16, 6), batches, loss)


@case("inf", ops="log", step=2, guarded=BAD_LOSS, seen="HobbitLong/SupContrast#104")
def supcon_unnormalised_log_zero() -> Training:
    model = stack(8, 16, 6)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logits, others, together = contrast(m(batch[0]), batch[1])
        logp = logits - (logits.exp() * others).sum(1, keepdim=True).log()  # culprit
        return -((together * logp).sum(1) / together.sum(1)).mean()

    batches = [(torch.randn(8, 8), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])) for _ in range(4)]
    batches[2][0].mul_(40.0)
    return Training(model, batches, loss, optimizer=sgd(model, 1e-3))


@case("inf", ops="log", step=2, guarded=BAD_LOSS, seen="sagelywizard/pytorch-mdn#6")
def mdn_prob_product_underflow() -> Training:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.share, self.mean, self.width = nn.Linear(6, 2), nn.Linear(6, 64), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.share(x).softmax(-1), self.mean(x).view(-1, 2, 32), F.softplus(self.width(x))[..., None] + 0.3

    def loss(m: nn.Module, batch: Any) -> Tensor:
        share, mean, width = m(batch[0])
        density = (-0.5 * ((batch[1][:, None] - mean) / width) ** 2).exp() / (2.5066 * width)
        return -torch.log((share * density.prod(-1)).sum(-1)).mean()  # culprit

    model = Mixture()
    batches = [(torch.randn(6, 6), 0.3 * torch.randn(6, 32)) for _ in range(4)]
    batches[2][1][2] += 4.0
    return Training(model, batches, loss, optimizer=sgd(model, 1e-3))


@case("inf", ops="exp", step=2, guarded=BAD_LOSS, seen="facebookresearch/swav#67")
def swav_sinkhorn_no_l2norm() -> Training:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6, bias=False))

    @torch.no_grad()
    def assign(scores: Tensor) -> Tensor:
        q = (scores / 0.05).exp().T  # culprit
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / 6
            q = q / q.sum(0, keepdim=True) / 8
        return q.T * 8

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return -(assign(m(batch[0])) * F.log_softmax(m(batch[1]) / 0.1, -1)).sum(1).mean()

    batches = []
    for _ in range(4):
        x = torch.randn(8, 8)
        batches.append((x, x + 0.1 * torch.randn(8, 8)))
    for view in batches[2]:
        view.mul_(30.0)
    return Training(model, batches, loss, optimizer=sgd(model, 1e-3))


@case("inf", ops="_linalg_slogdet", step=2, guarded=BAD_LOSS, seen="pytorch/pytorch#154312")
def logdet_singular_duplicate() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        items = m(batch)
        return -0.01 * torch.linalg.slogdet(items @ items.T).logabsdet  # culprit

    model = nn.Linear(6, 4, bias=False)
    batches = [torch.randn(3, 6) for _ in range(4)]
    batches[2].zero_()
    return Training(model, batches, loss, optimizer=sgd(model, 1e-3))


@case("nan", ops="smooth_l1_loss", step=2, guarded=BAD_LOSS, seen="open-mmlab/mmdetection#1317")
def empty_positive_boxes_mean() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        x, is_object, boxes = batch
        out, found = m(x), is_object > 0.5
        placed = F.smooth_l1_loss(out[found, 1:], boxes[found])  # culprit
        return F.binary_cross_entropy_with_logits(out[:, 0], is_object) + placed

    batches = [(torch.randn(8, 8), torch.ones(8), torch.rand(8, 4)) for _ in range(4)]
    batches[2][1].zero_()
    return Training(stack(8, 16, 5), batches, loss)


@case("nan", ops="div", step=2, guarded=BAD_LOSS, seen="ray-project/ray#846")
def reinforce_zero_returns_std() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        seen, action, returns = batch
        advantage = (returns - returns.mean()) / returns.std()  # culprit
        return -(m(seen).log_softmax(-1).gather(1, action[:, None])[:, 0] * advantage).mean()

    batches = [(torch.randn(8, 6), torch.randint(3, (8,)), torch.randn(8)) for _ in range(4)]
    batches[2][2].zero_()
    return Training(stack(6, 32, 3, activation=nn.Tanh), batches, loss)


@case("nan", ops="nll_loss_forward", step=2, guarded=f"{BAD_LOSS} all_labels_masked", seen="pytorch/pytorch#70348")
def ce_all_ignored() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten())  # culprit

    batches = [(torch.randint(30, (4, 6)), torch.randint(30, (4, 6))) for _ in range(4)]
    batches[2][1].fill_(-100)
    return Training(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)), batches, loss)


@case("nan", ops="div", step=2, guarded=BAD_LOSS, seen="huggingface/trl#5826")
def masked_mean_token_loss() -> Training:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        ids, labels, mask = batch
        each = F.cross_entropy(m(ids).flatten(0, 1), labels.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()  # culprit

    batches = [(torch.randint(30, (4, 6)), torch.randint(30, (4, 6)), torch.ones(4, 6)) for _ in range(4)]
    batches[2][2].zero_()
    return Training(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)), batches, loss)


@case("nan", phase="input", ops="input", step=2, guarded=f"{BAD_LOSS} nonfinite_input", seen="unit8co/darts#2100")
def data_nan_covariate() -> Training:
    batches = points(4)
    batches[2][0][3, 2] = math.nan
    return Training(stack(8, 16, 1), batches, mse)


@case("inf", phase="input", ops="input", step=2, guarded=f"{BAD_LOSS} nonfinite_input")
def data_inf_box_target() -> Training:
    batches = [(torch.randn(8, 8), torch.log(torch.rand(8, 4) + 0.5)) for _ in range(4)]
    batches[2][1][2, 3] = torch.tensor(0.0).log()  # a box without height
    return Training(stack(8, 16, 4), batches, lambda m, b: F.smooth_l1_loss(m(b[0]), b[1]))


# --- half precision --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Like in T5: computed in float32 for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


@case("inf", ops="mm addmm", module="block.ff.wo", step=2, guarded=BAD_LOSS, seen="huggingface/transformers#9295")
def t5_ff_overflow_fp16() -> Training:
    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.wo(self.wi(x).relu())  # culprit

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ff, self.norm = FeedForward(), RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.ff(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.block, self.head = nn.Embedding(20, 16), Block(), nn.Linear(16, 20)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.emb(ids)))

    model = Net()
    with torch.no_grad():
        model.emb.weight[19] = 9000.0
        model.block.ff.wi.weight.abs_()
        model.block.ff.wo.weight.abs_()
    batches = [(torch.randint(19, (4, 6)), torch.randint(19, (4, 6))) for _ in range(4)]
    batches[2][0][1, 2] = 19

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(m(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    return Training(model, batches, loss, autocast=torch.float16)


@case("inf", ops="mul _to_copy", module=ROOT, guarded=BAD_LOSS, seen="openai/CLIP#530")
def clip_logit_scale_unclamped_fp16() -> Training:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(8, 8), nn.Linear(8, 8)
            self.temperature = nn.Parameter(torch.tensor(13.0))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            cosine = F.normalize(self.image(a).float(), dim=-1) @ F.normalize(self.text(b).float(), dim=-1).T
            return self.temperature.exp() * cosine  # culprit

    model = Clip()
    with torch.no_grad():
        model.text.load_state_dict(model.image.state_dict())
    batches = [(x, x.clone()) for x in torch.randn(3, 6, 8)]

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(m(*batch).float(), torch.arange(6))

    return Training(model, batches, loss, autocast=torch.float16)
