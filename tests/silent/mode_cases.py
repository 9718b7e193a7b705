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


class Normed(nn.Module):
    """Normalises by a function, which takes the mode as an argument."""

    def __init__(self, *, is_always_training: bool = False, keeps_statistics: bool = True) -> None:
        super().__init__()
        self.inner, self.out, self.is_always_training = nn.Linear(8, 32), nn.Linear(32, 4), is_always_training
        self.register_buffer("mean", torch.zeros(32) if keeps_statistics else None)
        self.register_buffer("var", torch.ones(32) if keeps_statistics else None)

    def forward(self, x: Tensor) -> Tensor:
        is_training = self.is_always_training or self.training
        return self.out(F.batch_norm(self.inner(x), self.mean, self.var, training=is_training).relu())


def validate_at_times(model: nn.Module) -> Train:
    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(24)):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            if i % 8 == 5:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()

    return train


@case("norm_in_evaluation", "F.batch_norm(..., training=True) in a forward of one's own")
def function_norm_in_eval(bug: bool) -> Built:
    model = Normed(is_always_training=bug)
    return model, adam(model), validate_at_times(model)


class Forgetful(nn.Module):
    """Its train() puts everything in eval mode and then sets its own flag only."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.body, self.head, self.forgets = mlp(8, 32, 32, dropout=0.3), nn.Linear(32, 4), forgets

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def train(self, mode: bool = True) -> Forgetful:
        super().train(mode and not self.forgets)
        self.training = mode
        return self


@case("eval_while_training", "discuss.pytorch.org: a train() that is redefined and leaves the children in eval mode")
def children_left_in_eval(bug: bool) -> Built:
    model = Forgetful(forgets=bug)
    return model, adam(model), validate_at_times(model)


@case("eval_while_training", "the same in a part of the model")
def children_of_a_part_left_in_eval(bug: bool) -> Built:
    model = nn.Sequential(Forgetful(forgets=bug), nn.ReLU(), nn.Linear(4, 4))
    return model, adam(model), validate_at_times(model)


@case("eval_while_training", "what a wrapper holds is put in eval mode for a validation, and the wrapper in train mode")
def wrapped_model_left_in_eval(bug: bool) -> Built:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = mlp(8, 32, 4, dropout=0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = Wrapper()

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(24)):
            guard.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            if i == 5:
                model.module.eval()
                with torch.no_grad():
                    model(x)
                if not bug:
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


@case(None, "a sample in train mode before each validation in eval mode")
def sampled_before_validation(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.2)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(24)):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if i % 8 == 7:
                with torch.no_grad():
                    model(x[:1])
                    model.eval()
                    guard.validate(F.cross_entropy(model(x), y))
                model.train()

    return model, adam(model), train


@case(None, "several samples in train mode before each validation in eval mode")
def sampled_twice_before_validation(bug: bool) -> Built:
    model = mlp(8, 32, 4, dropout=0.2)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(24)):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if i % 8 == 7:
                with torch.no_grad():
                    first, second = x[:1], x[1:2]
                    model(first), model(second)
                    model.eval()
                    guard.validate(F.cross_entropy(model(x), y))
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


@case(None, "F.batch_norm without running statistics normalises by the batch in every mode")
def function_norm_of_the_batch(bug: bool) -> Built:
    model = Normed(is_always_training=True, keeps_statistics=False)
    return model, adam(model), validate_at_times(model)


@case(None, "BatchNorm(track_running_stats=False) does so too")
def norm_without_statistics(bug: bool) -> Built:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, track_running_stats=False), nn.ReLU(), nn.Linear(32, 4))
    return model, adam(model), validate_at_times(model)


@case(None, "train() is redefined to keep a frozen body in eval mode")
def frozen_body_in_eval(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(8, 32, 32, dropout=0.3).requires_grad_(False), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

        def train(self, mode: bool = True) -> Net:
            super().train(mode)
            self.body.eval()
            return self

    model = Net().train()
    return model, torch.optim.AdamW(model.head.parameters(), 1e-3), validate_at_times(model)


@case(None, "a prompt is learnt for a frozen model, which stays in eval mode as a whole")
def prompt_for_a_frozen_model(bug: bool) -> Built:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.prompt = mlp(8, 32, 4, dropout=0.3).requires_grad_(False), nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x + self.prompt)

        def train(self, mode: bool = True) -> Prompted:
            super().train(mode)
            self.frozen.eval()
            return self

    model = Prompted().train()
    return model, torch.optim.AdamW([model.prompt], 1e-2), validate_at_times(model)


@case(None, "mmdetection: train() is redefined to keep BatchNorm in eval mode, with statistics that were loaded")
def norms_kept_in_eval(bug: bool) -> Built:
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(8, 32, 32, norm=True)
            self.layers[1].running_mean.normal_()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def train(self, mode: bool = True) -> Backbone:
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
            return self

    model = nn.Sequential(Backbone(), nn.ReLU(), nn.Linear(32, 4)).train()
    return model, adam(model), validate_at_times(model)
