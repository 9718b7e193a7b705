"""Public cases in which every number is finite and the training is still wrong, and the public controls."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_case import Training, adam, case, classes, cross_entropy, mse, points, sgd, stack

SPIKE = "loss_spike loss_explosion outlier_loss divergence unrecovered_loss"
LARGE = "exploding_gradient high_gradient_norm rising_norm"


@case(guarded=SPIKE, step=30, seen="stanford-crfm/mistral#115")
def loss_spike_garbage_batch() -> Training:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    translated = torch.randperm(20)
    batches = []
    for step in range(45):
        ids = torch.randint(20, (8, 16))
        batches.append((ids, torch.randint(20, (8, 16)) if step == 30 else translated[ids]))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten())

    return Training(model, batches, loss, optimizer=adam(model, 0.05))


@case("exploding", module="blocks.0", guarded=LARGE, seen="facebookresearch/detectron2#5080")
def residual_frozen_bn_exploding() -> Training:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(32))
            self.register_buffer("var", torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.mean) / (self.var + 1e-5).sqrt()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = nn.Linear(32, 32), Frozen()
            nn.init.kaiming_normal_(self.fc.weight, nonlinearity="relu")

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.bn(self.fc(x))).relu()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out = nn.Sequential(*[Block() for _ in range(16)]), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.blocks(x))  # culprit

    model = Net()
    return Training(model, points(6, width=32), mse, optimizer=sgd(model, 1e-6))


@case(guarded=f"{LARGE} {SPIKE}", step=120, seen="hardmaru/WorldModelsExperiments#3")
def gaussian_nll_variance_collapse() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_variance = nn.Linear(6, 2), nn.Linear(6, 2)
            nn.init.zeros_(self.mean.weight)
            nn.init.zeros_(self.mean.bias)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.mean(x), self.log_variance(x)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        mean, log_variance = m(batch[0])
        return 0.5 * (log_variance + (batch[1] - mean).square() * torch.exp(-log_variance)).mean()

    model = Net()
    batches = []
    for step in range(130):
        x = torch.randn(16, 6)
        quiet = torch.zeros(16) if step < 120 else 0.1 * torch.randn(16)
        batches.append((x, torch.stack([x.sum(1), quiet], 1)))
    return Training(model, batches, loss, optimizer=adam(model, 0.1))


@case("vanishing", phase="backward", module="0", guarded="vanishing_gradient", late=8, seen="pytorch/pytorch#2623")
def deep_sigmoid_vanishing() -> Training:
    model = stack(8, *[32] * 16, 1, activation=nn.Sigmoid)
    return Training(model, points(8), mse, optimizer=sgd(model, 0.1))


@case("dead", module="1", step=3, guarded="dead_units vanishing_gradient", late=20, seen="keras-team/keras#7057")
def dead_relu_high_lr() -> Training:
    model = stack(8, 32, 1)
    batches = [(x, 2 * x[:, :1] - 5) for x in torch.rand(20, 16, 8)]
    return Training(model, batches, mse, optimizer=sgd(model, 0.4))


@case(guarded=f"{SPIKE} {LARGE} update_ratio rate_too_high", step=1, late=3, seen="jumon/whisper-finetuning#13")
def lr_no_warmup_adam_spike() -> Training:
    weight = torch.randn(8, 1) / 8**0.5
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    before = adam(model, 1e-2)
    for _ in range(200):
        x = torch.randn(32, 8)
        before.zero_grad()
        F.mse_loss(model(x), x @ weight).backward()
        before.step()
    batches = [(x, x @ weight + 0.05 * torch.randn(16, 1)) for x in torch.randn(20, 16, 8)]
    return Training(model, batches, mse, optimizer=adam(model, 0.3))


@case(guarded="scaler_collapse stale_gradient nonfinite_gradient", step=2, late=30, seen="PaddlePaddle/Paddle#67895")
def scaler_stale_inf_grads() -> Training:
    model = stack(8, 32, 4)

    def loop(training: Training, batch: Any) -> Tensor:
        loss, scaler = training.loss(training.model, batch), training.scaler
        assert scaler is not None
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(training.optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            training.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def guarded_loop(training: Training, guard: Any, batch: Any) -> None:
        assert training.scaler is not None
        training.scaler.scale(training.loss(training.model, batch)).backward()
        guard.step()
        if not guard.last.skipped:
            training.optimizer.zero_grad(set_to_none=True)

    batches = classes(30)
    batches[2][0].mul_(300.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    settings = {"autocast": torch.float16, "scaler": scaler, "optimizer": sgd(model, 0.05)}
    return Training(model, batches, cross_entropy, loop=loop, guarded_loop=guarded_loop, **settings)


@case(guarded="stale_gradient rising_norm loss_explosion divergence loss_spike", step=1, late=39)
def no_zero_grad() -> Training:
    model = stack(8, 16, 1)

    def loop(training: Training, batch: Any) -> Tensor:
        loss = training.loss(training.model, batch)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    def guarded_loop(training: Training, guard: Any, batch: Any) -> None:
        training.loss(training.model, batch).backward()
        guard.step()

    batches = points(40, size=16)
    settings = {"optimizer": sgd(model, 0.05), "loop": loop, "guarded_loop": guarded_loop}
    return Training(model, batches, mse, **settings)


@case(guarded="missing_gradient", late=14, seen="huggingface/transformers#21381")
def checkpoint_reentrant_no_grad() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.block, self.head = nn.Linear(8, 16), stack(16, 16, 16), nn.Linear(16, 4)
            self.emb.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, self.emb(x), use_reentrant=True))

    model = Net()
    trained = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Training(model, classes(15), cross_entropy, optimizer=trained)


@case(guarded="unregistered_layers parameter_not_optimized foreign_parameter unoptimized_parameters", late=24)
def optimizer_stale_after_surgery() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = stack(8, 16, 16), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).relu())

    model = Net()
    optimizer = adam(model, 1e-2)
    model.head = nn.Linear(16, 4)
    return Training(model, classes(25), cross_entropy, optimizer=optimizer)


@case(guarded="silent_broadcast", seen="pytorch/pytorch#16045")
def mse_silent_broadcast() -> Training:
    model = stack(8, 16, 1)
    batches = [(x, 3 * y[:, 0]) for x, y in points(20, size=32)]
    return Training(model, batches, lambda m, b: (m(b[0]) - b[1]).square().mean(), optimizer=adam(model, 1e-2))


# --- controls --------------------------------------------------------------------------------------------------------


@case()
def ok_warmup_bump() -> Training:
    model = stack(8, 32, 4)
    optimizer = adam(model, 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    return Training(model, classes(60), cross_entropy, optimizer=optimizer, scheduler=scheduler)


@case()
def ok_sparse_embedding_zero_grads() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.out = nn.Embedding(2000, 8, sparse=True), nn.Linear(8, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.emb(ids).mean(1))

    model = Net()
    labels = torch.randint(2, (50,))
    batches = [(ids.repeat(1, 4), labels[ids[:, 0]]) for ids in torch.randint(50, (40, 16, 1))]
    return Training(model, batches, cross_entropy, optimizer=sgd(model, 0.5))


@case()
def ok_amp_scaler_backoff() -> Training:
    model = stack(8, 32, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    settings = {"optimizer": sgd(model, 0.1), "autocast": torch.float16, "scaler": scaler}
    return Training(model, classes(40), cross_entropy, **settings)


@case()
def ok_noisy_small_batch() -> Training:
    weight = torch.randn(8, 1) / 8**0.5
    batches = [(x, x @ weight + 0.5 * torch.randn(1, 1)) for x in torch.randn(100, 1, 8)]
    return Training(stack(8, 16, 1), batches, mse)


@case()
def ok_fixed_subgradients() -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            extra = torch.cdist(h, h).mean() + h.norm(dim=1).mean() + h[:2].std(0).mean()
            extra = extra + torch.atan2(h[:, 0], h[:, 1]).mean()
            seen = torch.ones(len(h), len(h), dtype=torch.bool)
            seen[0] = False
            q = h[None, None]
            return F.scaled_dot_product_attention(q, q, q, attn_mask=seen)[0, 0].sum(1) + 1e-3 * extra

    batches = [(torch.randn(8, 6), torch.randn(8)) for _ in range(20)]
    for x, _ in batches:
        x[:2] = 0.0
    return Training(Net(), batches, mse)


@case()
def ok_inf_init_buffers_and_logs() -> Training:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in (("low", math.inf), ("high", -math.inf), ("best", math.inf)):
                self.register_buffer(name, torch.tensor(value))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.low.copy_(torch.minimum(self.low, x.min()))
                self.high.copy_(torch.maximum(self.high, x.max()))
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.observer, self.fc2 = nn.Linear(8, 16), Observer(), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.observer(self.fc1(x)).relu())

    def loss(m: Any, batch: Any) -> Tensor:
        found = mse(m, batch)
        m.observer.best.copy_(torch.minimum(m.observer.best, found.detach()))
        return found

    model = Net()
    return Training(model, points(30), loss, optimizer=adam(model, 1e-2))


@case()
def ok_long_plateau_then_drop() -> Training:
    model = stack(2, 16, 1, activation=nn.Tanh)
    batches = []
    for _ in range(120):
        corner = torch.randint(2, (32, 2)).float() * 2 - 1
        batches.append((corner + 0.05 * torch.randn(32, 2), (corner.prod(1, keepdim=True) < 0).float()))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(m(batch[0]), batch[1])

    return Training(model, batches, loss, optimizer=sgd(model, 0.3))


@case()
def ok_large_sum_loss_clipped() -> Training:
    model = stack(32, 64, 32)
    weight = torch.randn(32, 32)
    batches = [(x, x @ weight) for x in torch.randn(60, 64, 32)]
    return Training(model, batches, lambda m, b: (m(b[0]) - b[1]).square().sum(), optimizer=adam(model, 1e-2), clip=1.0)


@case(guarded=f"{SPIKE} {LARGE}", step=1, seen="Lightning-AI/pytorch-lightning#12811")
def accumulation_not_averaged() -> Training:
    model = stack(8, 16, 1)
    seen = {"num": 0}

    def loop(training: Training, batch: Any) -> Tensor:
        loss = training.loss(training.model, batch)
        loss.backward()
        seen["num"] += 1
        if seen["num"] % 16 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def guarded_loop(training: Training, guard: Any, batch: Any) -> None:
        guard.backward(training.loss, training.model, batch)
        seen["num"] += 1
        if seen["num"] % 16 == 0:
            guard.step()

    settings = {"optimizer": sgd(model, 0.1), "loop": loop, "guarded_loop": guarded_loop}
    return Training(model, points(160, size=4), mse, **settings)
