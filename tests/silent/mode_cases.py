"""Errors of train() and eval(), and programs that look like them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


@case("eval_while_training", "discuss.pytorch.org: model.train() forgotten after validation")
def eval_left_on(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.3)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(40)):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            if i == 19:
                model.eval()
                with torch.no_grad():
                    guard.validate(float(F.cross_entropy(model(x), y)))
                if not bug:
                    model.train()

    return model, adam(model), train


@case("eval_while_training", "transformers: from_pretrained returns a model in eval mode")
def loaded_in_eval(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.1).eval()
    if not bug:
        model.train()

    def train(guard: Any) -> None:
        for x, y in clusters(16):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))

    return model, adam(model), train


@case("eval_while_training", "stackoverflow: BatchNorm in eval mode from the start")
def fresh_norm_in_eval(bug: bool) -> Built:
    model = mlp(8, 32, 4, norm=True).train(not bug)

    def train(guard: Any) -> None:
        for x, y in clusters(16):
            guard.step(F.cross_entropy(model(x), y))  # a loss, not a function

    return model, adam(model), train


@case("dropout_in_evaluation", "pytorch/pytorch: scaled_dot_product_attention has no training flag")
def attention_dropout_in_eval(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.view(len(x), 1, 8)).unsqueeze(1).chunk(3, -1)
            p = 0.2 if bug or self.training else 0.0
            return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).reshape(len(x), 8))

    model = Net()

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(12)):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            if i == 5:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()

    return model, adam(model), train


@case("dropout_in_evaluation", "discuss.pytorch.org: a submodule that overrides train()")
def stray_dropout(bug: bool) -> Built:
    class Stubborn(nn.Dropout):
        def train(self, mode: bool = True) -> Stubborn:
            return super().train(True) if bug else super().train(mode)

    model = nn.Sequential(nn.Linear(8, 32), Stubborn(0.3), nn.Linear(32, 4))

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(12)):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            if i == 5:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()

    return model, adam(model), train


@case("train_mode_validation", "a validation loop without eval(), of a program that reports nothing")
def train_mode_blocks(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.2)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(50)):
            guard.step(F.cross_entropy(model(x), y))
            if i % 15 == 14:
                model.train(bug)
                with torch.no_grad():
                    for held_out, _ in clusters(2):
                        model(held_out)
                model.train()

    return model, adam(model), train


# --- nothing to find --------------------------------------------------------------------------------------------------


@case("train_mode_validation", "a validation without eval() and without no_grad()")
def validated_with_gradients(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.3)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(24)):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if i % 8 == 7:
                model.train(bug)
                guard.validate(F.cross_entropy(model(x), y).detach())
                model.train()

    return model, adam(model), train


@case(None, "pseudo-labels from the model itself, in train mode, at every step")
def pseudo_labels(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.2)

    def train(guard: Any) -> None:
        for x, y in clusters(40):
            with torch.no_grad():
                guess = model(x).argmax(1)
            guard.step(F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(x), guess))

    return model, adam(model), train


@case(None, "pytorch/tutorials: a DCGAN draws a picture from fixed noise now and then, in train mode")
def samples_from_fixed_noise(bug: bool) -> Built:
    model, noise = mlp(8, 32, 4, norm=True), torch.randn(16, 8)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(60)):
            guard.step(F.cross_entropy(model(x), y))
            if i % 15 == 14:
                with torch.no_grad():
                    model(noise)

    return model, adam(model), train


@case(None, "torch.optim.swa_utils.update_bn between epochs")
def recalibrated_norms(bug: bool) -> Built:
    model = mlp(8, 32, 4, norm=True)

    def train(guard: Any) -> None:
        for _ in range(3):
            batches = list(clusters(12))
            for x, y in batches:
                guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            torch.optim.swa_utils.update_bn([x for x, _ in batches], model)

    return model, adam(model), train


@case(None, "frozen BatchNorm inside a model in training")
def frozen_norm(bug: bool) -> Built:
    model = mlp(8, 32, 4, norm=True)
    model[1].eval().requires_grad_(False)

    def train(guard: Any) -> None:
        for x, y in clusters(20):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))

    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), train


@case(None, "a model that is random in evaluation, without dropout")
def random_without_dropout(bug: bool) -> Built:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            mean, spread = self.inner(x).chunk(2, 1)
            return self.out(mean + torch.randn_like(mean) * spread.exp())

    model = Vae()

    def train(guard: Any) -> None:
        for i, (x, _) in enumerate(clusters(24)):
            guard.step(lambda x=x: F.mse_loss(model(x), x))
            if i % 8 == 7:
                model.eval()
                with torch.no_grad():
                    guard.validate(float(F.mse_loss(model(x), x)))
                model.train()

    return model, adam(model), train
