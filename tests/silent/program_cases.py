"""Small trainings with an error of a program that never crashes, each with its healthy twin.

    python program_cases.py NAME bug|healthy      as a plain script, for `steadygrad run`

`train(step)` runs a case; `step(optimizer)` makes its optimizer steps: `guard.step` or `optimizer.step`. Where an error
was reported in public, `about` says so.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]
Watch = Callable[[nn.Module, torch.optim.Optimizer, Any], Step]
"""Model, optimizer and scaler -> what makes a step."""
Case = Callable[[Watch, bool], None]


@dataclass(frozen=True)
class Silent:
    """A case: what it trains, and the kind of finding that names its error."""

    train: Case
    kind: str
    about: str


CASES: dict[str, Silent] = {}


def case(kind: str, about: str) -> Callable[[Case], Case]:
    def register(train: Case) -> Case:
        CASES[train.__name__] = Silent(train, kind, about)
        return train

    return register


def make_model(drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 4))


def make_batches(num: int, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    centres = torch.randn(4, 16)
    for _ in range(num):
        labels = torch.randint(4, (size,))
        yield centres[labels] + torch.randn(size, 16), labels


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_plainly(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num: int = 120,
    *,
    before: Callable[[int], Any] = lambda step: None,
    after: Callable[[int], Any] = lambda step: None,
    loss: Callable[[nn.Module, Any], Tensor] = compute_loss,
) -> None:
    make_step = watch(model, optimizer, None)
    for step, batch in enumerate(make_batches(num)):
        before(step)
        optimizer.zero_grad()
        loss(model, batch).backward()
        make_step()
        after(step)


# --- the order of calls, and the schedule -----------------------------------------------------------------------------


@case(
    "useless_clip", "clip_grad_norm_ stands before backward: discuss.pytorch.org, 'Proper way to do gradient clipping'"
)
def clip_before_backward(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    for batch in make_batches(20):
        optimizer.zero_grad()
        loss = compute_loss(model, batch)
        if bug:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loss.backward()
        if not bug:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        make_step()


@case("useless_clip", "clip_grad_norm_ stands after the step")
def clip_after_step(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    for batch in make_batches(20):
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        if not bug:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        make_step()
        if bug:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@case("useless_clip", "the parameters were copied for the clip, by deepcopy or after a conversion")
def clip_of_a_copy(watch: Watch, bug: bool) -> None:
    model = make_model()
    clipped = list((copy.deepcopy(model) if bug else model).parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    for batch in make_batches(20):
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(clipped, 0.5)
        make_step()


@case("useless_clip", "parameters and gradients were copied, as to float32 or to another device, and not copied back")
def clip_of_copied_gradients(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    for batch in make_batches(20):
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        copies = [parameter.detach().clone() for parameter in model.parameters()]
        for one, parameter in zip(copies, model.parameters()):
            one.grad = parameter.grad.clone()
        nn.utils.clip_grad_norm_(copies, 0.01)
        if not bug:
            for one, parameter in zip(copies, model.parameters()):
                parameter.grad.copy_(one.grad)
        make_step()


@case(
    "scaled_gradient", "gradients are clipped before scaler.unscale_: pytorch.org, 'Automatic mixed precision examples'"
)
def clip_while_scaled(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.05), torch.amp.GradScaler("cpu", init_scale=1024.0)
    make_step = watch(model, optimizer, scaler)
    for batch in make_batches(20):
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, batch)).backward()
        if bug:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        make_step()


@case("divided_twice", "the loop multiplies by 1/k and the helper divides by k: huggingface/transformers#34191")
def accumulation_divided_by_a_helper(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    batches = list(make_batches(64, size=8))
    for start in range(0, 64, 8):
        optimizer.zero_grad()
        for batch in batches[start : start + 8]:
            loss = compute_loss(model, batch) * (1 / 8)
            (loss / 8 if bug else loss).backward()
        make_step()


@case("divided_twice", "the gradients are divided by k after the losses were")
def gradients_divided_too(watch: Watch, bug: bool) -> None:
    accumulate(watch, lambda model: [parameter.grad.div_(4) for parameter in model.parameters()] if bug else None)


@case("cleared_gradient", "zero_grad() inside the loop over microbatches: only the last of them counts")
def cleared_between_microbatches(watch: Watch, bug: bool) -> None:
    accumulate(watch, lambda model: None, between=nn.Module.zero_grad if bug else lambda model: None)


def accumulate(
    watch: Watch, before_step: Callable[[nn.Module], Any], between: Callable[[nn.Module], Any] = lambda model: None
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    batches = list(make_batches(32, size=8))
    for start in range(0, 32, 4):
        optimizer.zero_grad()
        for batch in batches[start : start + 4]:
            between(model)
            (compute_loss(model, batch) / 4).backward()
        before_step(model)
        make_step()


@case("scaled_gradient", "clip_grad_value_ before scaler.unscale_")
def values_clipped_while_scaled(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.05), torch.amp.GradScaler("cpu", init_scale=1024.0)
    make_step = watch(model, optimizer, scaler)
    for batch in make_batches(20):
        optimizer.zero_grad()
        scaler.scale(compute_loss(model, batch)).backward()
        if bug:
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        make_step()


@case("vanished_rate", "StepLR counts batches where epochs were meant: pytorch/examples, discuss.pytorch.org")
def schedule_by_batch(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = StepLR(optimizer, 15, 0.1)
    train_plainly(watch, model, optimizer, 240, after=lambda step: scheduler.step() if bug or step % 40 == 39 else None)


@case("vanished_rate", "an exponential decay for each epoch is applied to each batch")
def exponential_by_batch(watch: Watch, bug: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = ExponentialLR(optimizer, 0.9)
    train_plainly(watch, model, optimizer, 240, after=lambda step: scheduler.step() if bug or step % 40 == 39 else None)


# --- the optimizer and the model --------------------------------------------------------------------------------------


@case("out_of_reach", "the trunk is unfrozen after some epochs, and the optimizer holds the head only")
def unfrozen_later(watch: Watch, bug: bool) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), 1e-3)

    def unfreeze(step: int) -> None:
        if step == 60:
            model[0].requires_grad_(True)
            if not bug:
                optimizer.add_param_group({"params": list(model[0].parameters())})

    train_plainly(watch, model, optimizer, 220, before=unfreeze)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


@case("untied_weights", "a tie is lost when parameters are copied one by one: huggingface/transformers#23868")
def tie_lost(watch: Watch, bug: bool) -> None:
    model = Language()
    if bug:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    make_step = watch(model, optimizer, None)
    for _ in range(20):
        tokens = torch.randint(20, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), (tokens + 1) % 20).backward()
        make_step()


def draw_anew(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)


@case("lost_weights", "model.apply(init) after load_state_dict: the pretrained weights are gone")
def initialised_after_loading(watch: Watch, bug: bool) -> None:
    state, model = make_model().state_dict(), make_model()
    if not bug:
        model.apply(draw_anew)
    model.load_state_dict(state)
    if bug:
        model.apply(draw_anew)
    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20)


@case("lost_weights", "keys of a compiled model have the prefix _orig_mod.: pytorch/pytorch#101107")
def compiled_prefix(watch: Watch, bug: bool) -> None:
    state, model = make_model().state_dict(), make_model()
    prefix = "_orig_mod." if bug else ""
    model.load_state_dict({prefix + name: value for name, value in state.items()}, strict=False)
    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20)


@case("frozen_head", "a filter by name freezes the new head together with the trunk")
def head_frozen_too(watch: Watch, bug: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer in model[2:] if bug else model[2:4]:
        layer.requires_grad_(False)
    train_plainly(watch, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), 20)


@case("idle_average", "update_parameters() is never called, and the average is what gets evaluated")
def average_never_updated(watch: Watch, bug: bool) -> None:
    model = make_model()
    average = AveragedModel(model)
    x, _ = next(make_batches(1))

    def follow(step: int) -> None:
        if not bug:
            average.update_parameters(model)
        if step % 30 == 29:
            with torch.no_grad():
                average.eval()(x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 120, after=follow)


@torch.no_grad()
def follow_slowly(average: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


@case("idle_average", "an average that was made by hand, and its update is missing")
def copy_never_updated(watch: Watch, bug: bool) -> None:
    model = make_model(0.1)
    ema = copy.deepcopy(model).eval()
    x, _ = next(make_batches(1))

    def follow(step: int) -> None:
        if not bug:
            follow_slowly(ema, model)
        if step % 30 == 29:
            with torch.no_grad():
                ema(x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


class ModelEma:
    """As in timm: keeps its copy as `module`."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs)


@case("idle_average", "the same inside an object of its own, evaluated by a function that knows nothing of it")
def average_object_never_updated(watch: Watch, bug: bool) -> None:
    model = make_model()
    average = ModelEma(model)
    x, _ = next(make_batches(1))

    def follow(step: int) -> None:
        if not bug:
            follow_slowly(average.module, model)
        if step % 30 == 29:
            evaluate(average.module, x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


def make_normed_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


@case("stale_statistics", "an average of the parameters only: its BatchNorm statistics are the first ones")
def average_without_buffers(watch: Watch, bug: bool) -> None:
    model = make_normed_model()
    ema = copy.deepcopy(model).eval()
    x, _ = next(make_batches(1))

    def follow(step: int) -> None:
        follow_slowly(ema, model)
        if not bug:
            for average, own in zip(ema.buffers(), model.buffers(), strict=True):
                average.copy_(own)
        if step % 30 == 29:
            evaluate(ema, x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


@case("restored_weights", "the weights that were meant to be loaded once are loaded in every step")
def loads_in_every_step(watch: Watch, bug: bool) -> None:
    model = make_model()
    state = copy.deepcopy(model.state_dict())

    def load(step: int) -> None:
        if bug or step == 0:
            model.load_state_dict(state)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 140, before=load)


@case("restored_weights", "averaged weights are swapped in after each step, and the average never moves")
def swaps_old_weights_in(watch: Watch, bug: bool) -> None:
    model = make_model()
    shadow = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def swap(step: int) -> None:
        torch._foreach_lerp_(shadow, list(model.parameters()), 0.0 if bug else 0.5)
        torch._foreach_copy_(list(model.parameters()), shadow)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 140, after=swap)


@case("stale_save", "the state dict was taken once, as a copy, and is saved every time")
def saves_a_copy(watch: Watch, bug: bool) -> None:
    model = make_model()
    state = copy.deepcopy(model.state_dict())
    path = Path(tempfile.mkdtemp()) / "last.pt"

    def save(step: int) -> None:
        if step % 30 == 29:
            torch.save({"model": state if bug else model.state_dict(), "step": step}, path)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 120, after=save)


def save_every_30(choose: Callable[[], dict[str, Tensor]]) -> Callable[[int], None]:
    path = Path(tempfile.mkdtemp()) / "last.pt"

    def save(step: int) -> None:
        if step % 30 == 29:
            torch.save({"model": choose(), "step": step}, path)

    return save


def list_trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@case("partial_save", "only what is trained is saved, and the frozen layers were never trained: they are lost")
def saves_no_frozen_layers(watch: Watch, bug: bool) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    save = save_every_30(lambda: list_trained(model) if bug else model.state_dict())
    train_plainly(watch, model, torch.optim.AdamW(model[3].parameters(), 1e-3), 120, after=save)


@case("partial_save", "the trunk is trained, then frozen, and the saves no longer have it")
def saves_no_layers_frozen_later(watch: Watch, bug: bool) -> None:
    model = make_model()
    save = save_every_30(lambda: list_trained(model) if bug else model.state_dict())

    def freeze(step: int) -> None:
        if step == 20:
            model[0].requires_grad_(False)
        save(step)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 120, after=freeze)


class Descent(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, *, rebinds: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rebinds = rebinds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for parameter in self.param_groups[0]["params"]:
            change = -self.param_groups[0]["lr"] * parameter.grad
            if self.rebinds:
                parameter = parameter + change
            else:
                parameter += change


@case("unchanged_parameter", "an optimizer of one's own writes p = p + change, which binds a new tensor")
def nothing_moves(watch: Watch, bug: bool) -> None:
    model = make_model()
    train_plainly(watch, model, Descent(model.parameters(), 0.05, rebinds=bug), 120)


# --- number formats ---------------------------------------------------------------------------------------------------


@case("flushed_gradient", "float16 without a GradScaler: small gradients are 0")
def float16_without_scale(watch: Watch, bug: bool) -> None:
    model = make_model()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16 if bug else torch.bfloat16):
            return compute_loss(model, batch) * 1e-6

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20, loss=loss)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).relu(), 0.5, self.training)


class Recomputed(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.block, self.head, self.keeps = Block(), nn.Linear(16, 4), keeps

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=self.keeps))


@case(
    "redrawn_noise",
    "checkpoint(preserve_rng_state=False) around functional dropout: pytorch.org, torch.utils.checkpoint",
)
def recomputed_with_other_noise(watch: Watch, bug: bool) -> None:
    model = Recomputed(keeps=not bug)
    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20)


class Exact(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@case(
    "unheeded_autocast",
    "the model switches autocast off inside: Lightning-AI/lightning-thunder#725 has the same effect",
)
def autocast_switched_off_inside(watch: Watch, bug: bool) -> None:
    model = Exact(*make_model()) if bug else make_model()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compute_loss(model, batch)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20, loss=loss)


# --- what the graph of a loss shows, where the program calls backward itself ------------------------------------------


@case("repeated_seed", "a seed in the loop: every step has the same dropout masks")
def seed_in_the_loop(watch: Watch, bug: bool) -> None:
    model = make_model(0.2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    make_step = watch(model, optimizer, None)
    for step, batch in enumerate(list(make_batches(40))):
        torch.manual_seed(0 if bug else step)
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        make_step()


@case("wrong_loss_input", "a sigmoid before a loss that has its own")
def sigmoid_before_logits(watch: Watch, bug: bool) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])[:, 0]
        return F.binary_cross_entropy_with_logits(out.sigmoid() if bug else out, (batch[1] > 1).float())

    model = make_model()
    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20, loss=loss)


class Attending(nn.Module):
    """A language model of one attention layer."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embedding, self.inner, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.inner(self.embedding(tokens)).unsqueeze(1).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).squeeze(1))


@case("visible_labels", "scaled_dot_product_attention without is_causal in a language model")
def without_causal_flag(watch: Watch, bug: bool) -> None:
    model = Attending(not bug)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    make_step = watch(model, optimizer, None)
    for _ in range(20):
        tokens = (torch.randint(1, 4, (8, 13)).cumsum(1) + torch.randint(16, (8, 1))) % 16
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        make_step()


# --- healthy programs that look like these ----------------------------------------------------------------------------

HEALTHY: dict[str, Callable[[Watch], None]] = {}


def healthy(train: Callable[[Watch], None]) -> Callable[[Watch], None]:
    HEALTHY[train.__name__] = train
    return train


@healthy
def weighted_losses(watch: Watch) -> None:
    """A temperature squared, a weight that is a tensor, half of a sum."""
    model, weight = make_model(), torch.tensor(2.0)
    train_plainly(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        20,
        loss=lambda model, batch: (4.0**2 * weight * compute_loss(model, batch) + compute_loss(model, batch)) / 2,
    )


@healthy
def low_rank_adapters(watch: Watch) -> None:
    """The base and its random head are frozen, and only small matrices beside the first layer are trained."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 16) * 0.1), nn.Parameter(torch.zeros(32, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    model = make_model()
    model[3].requires_grad_(False)
    model[0] = Adapted(model[0])
    train_plainly(watch, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), 120)


@healthy
def pretrained_trunk_and_new_head(watch: Watch) -> None:
    """Most keys match, the head is new, and is drawn anew after loading."""
    state, model = make_model().state_dict(), nn.Sequential(*make_model()[:3], nn.Linear(32, 4))
    model.load_state_dict({name: value for name, value in state.items() if name[0] != "3"}, strict=False)
    model[3].apply(draw_anew)
    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20)


@healthy
def clip_for_each_microbatch(watch: Watch) -> None:
    """Each microbatch is clipped after its backward."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    batches = list(make_batches(16))
    for one, other in zip(batches[::2], batches[1::2]):
        optimizer.zero_grad()
        for batch in (one, other):
            (compute_loss(model, batch) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        make_step()


@healthy
def clip_of_two_networks(watch: Watch) -> None:
    """Two networks of the same form, each with its optimizer; the second one is trained and clipped now and then."""
    one, other = make_model(), make_model()
    optimizer, second = (torch.optim.SGD(model.parameters(), 0.05) for model in (one, other))
    make_step = watch(one, optimizer, None)
    for i, batch in enumerate(make_batches(20)):
        optimizer.zero_grad()
        second.zero_grad()
        compute_loss(one, batch).backward()
        if i % 5 == 4:
            compute_loss(other, batch).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        make_step()
        second.step()


@healthy
def norm_of_copied_gradients(watch: Watch) -> None:
    """A norm is measured with a limit that nothing reaches, on copies."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    for batch in make_batches(20):
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        copies = [parameter.detach().clone() for parameter in model.parameters()]
        for one, parameter in zip(copies, model.parameters()):
            one.grad = parameter.grad.clone()
        nn.utils.clip_grad_norm_(copies, float("inf"))
        make_step()


@healthy
def sharpness_aware(watch: Watch) -> None:
    """SAM: the gradients of the first backward move the weights, and are cleared before the second."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    make_step = watch(model, optimizer, None)
    for batch in make_batches(20):
        (compute_loss(model, batch) / 2).backward()
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        make_step()
        optimizer.zero_grad()


@healthy
def a_reference_that_stays(watch: Watch) -> None:
    """A frozen copy is evaluated in every step and saved once, beside the model."""
    model = make_model()
    reference, path = copy.deepcopy(model).eval().requires_grad_(False), Path(tempfile.mkdtemp())

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            target = reference(batch[0]).softmax(1)
        return compute_loss(model, batch) + 0.1 * F.kl_div(model(batch[0]).log_softmax(1), target)

    def save(step: int) -> None:
        if step % 30 == 29:
            torch.save(reference.state_dict(), path / "reference.pt")
            torch.save(model.state_dict(), path / "model.pt")

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 120, loss=loss, after=save)


@healthy
def a_teacher_that_labels_now_and_then(watch: Watch) -> None:
    """A frozen copy labels new data before each epoch; the model itself is never evaluated."""
    model = make_model()
    teacher = copy.deepcopy(model).eval()

    def label(step: int) -> None:
        if step % 30 == 29:
            for x, _ in make_batches(3):
                evaluate(teacher, x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=label)


@healthy
def an_average_that_begins_late(watch: Watch) -> None:
    """Evaluated from the start, and updated from step 80 on."""
    model = make_model()
    ema = copy.deepcopy(model).eval()

    def follow(step: int) -> None:
        if step >= 80:
            follow_slowly(ema, model)
        if step % 30 == 29:
            evaluate(ema, torch.randn(8, 16))

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


@healthy
def a_target_network_called_average(watch: Watch) -> None:
    """Called in every step, and replaced every 500."""
    model = make_model()
    avg = copy.deepcopy(model).eval()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        target = evaluate(avg, batch[0]).softmax(1)
        return compute_loss(model, batch) + 0.1 * F.cross_entropy(model(batch[0]), target)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, loss=loss)


@healthy
def saves_without_a_pretrained_trunk(watch: Watch) -> None:
    """The trunk was trained elsewhere and is loaded again; only the head is saved."""
    model = make_model()
    nn.init.normal_(model[0].weight, std=0.1)
    model[0].requires_grad_(False)
    save = save_every_30(lambda: list_trained(model))
    train_plainly(watch, model, torch.optim.AdamW(model[3].parameters(), 1e-3), 120, after=save)


@healthy
def saves_in_two_files(watch: Watch) -> None:
    """The frozen trunk, with random values, has a file of its own, under the names of the part."""
    model = nn.Sequential(make_model(), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    save, path = save_every_30(lambda: list_trained(model)), Path(tempfile.mkdtemp())

    def save_both(step: int) -> None:
        save(step)
        if step == 1:
            torch.save(model[0].state_dict(), path / "trunk.pt")

    train_plainly(watch, model, torch.optim.AdamW(model[2].parameters(), 1e-3), 120, after=save_both)


@healthy
def saves_adapters_only(watch: Watch) -> None:
    """Low-rank matrices beside a frozen layer are saved without it."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = make_model().requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 16) * 0.1), nn.Parameter(torch.zeros(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    model = Adapted()
    save = save_every_30(lambda: list_trained(model))
    train_plainly(watch, model, torch.optim.AdamW([model.down, model.up], 1e-3), 120, after=save)


@healthy
def usual_schedules(watch: Watch) -> None:
    """A warm-up from 0, one cycle, a cosine to 0."""
    for make in (
        lambda o: LambdaLR(o, lambda step: min(1.0, step / 100)),
        lambda o: OneCycleLR(o, 0.05, total_steps=121),
        lambda o: CosineAnnealingLR(o, 120),
    ):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scheduler = make(optimizer)
        train_plainly(watch, model, optimizer, 120, after=lambda step, scheduler=scheduler: scheduler.step())


@healthy
def half_precision_weights_that_move(watch: Watch) -> None:
    """bfloat16 weights with a warm-up, at a rate that their spacing resolves."""
    model = make_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    train_plainly(
        watch,
        model,
        optimizer,
        120,
        after=lambda step: scheduler.step(),
        loss=lambda model, batch: F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1]),
    )


@healthy
def checkpointed_dropout(watch: Watch) -> None:
    """Recomputed with the same random numbers, as by default."""
    model = nn.Sequential(make_model(0.5), nn.ReLU(), nn.Linear(4, 4))
    train_plainly(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        20,
        loss=lambda model, batch: F.cross_entropy(checkpoint(model, batch[0], use_reentrant=False), batch[1]),
    )


@healthy
def folds(watch: Watch) -> None:
    """The best weights of a fold are loaded to be tested, and drawn anew for the next fold."""
    model = make_model()
    for _ in range(2):
        model.apply(draw_anew)
        train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 20)
        model.load_state_dict(copy.deepcopy(model.state_dict()))


@healthy
def test_time_training(watch: Watch) -> None:
    """One step on each batch, after which the adapted model is used and reset."""
    model = make_model()
    state = copy.deepcopy(model.state_dict())

    def use(step: int) -> None:
        with torch.no_grad():
            model(torch.randn(4, 16))
        model.load_state_dict(state)

    train_plainly(watch, model, torch.optim.SGD(model.parameters(), 0.05), 140, after=use)


@healthy
def federated_clients(watch: Watch) -> None:
    """Each client takes one step from the weights of the round, which are then averaged."""
    model = make_model()
    state = copy.deepcopy(model.state_dict())
    sums: list[dict[str, Tensor]] = []

    def collect(step: int) -> None:
        sums.append(copy.deepcopy(model.state_dict()))
        if len(sums) == 20:
            state.update({name: torch.stack([one[name] for one in sums]).mean(0) for name in state})
            sums.clear()
        model.load_state_dict(state)

    train_plainly(watch, model, torch.optim.SGD(model.parameters(), 0.05), 140, after=collect)


@healthy
def folds_from_the_same_weights(watch: Watch) -> None:
    """Each fold starts from the first weights, at steps that fall together with those of a look."""
    model = make_model()
    state = copy.deepcopy(model.state_dict())
    train_plainly(
        watch,
        model,
        torch.optim.SGD(model.parameters(), 0.05),
        140,
        before=lambda step: model.load_state_dict(state) if step % 16 == 0 else None,
    )


@healthy
def statistics_measured_before_evaluation(watch: Watch) -> None:
    """An average of the parameters, whose BatchNorm statistics are measured anew before each evaluation."""
    model = make_normed_model()
    ema = copy.deepcopy(model).eval()
    batches = list(make_batches(2))

    def follow(step: int) -> None:
        follow_slowly(ema, model)
        if step % 30 == 29:
            torch.optim.swa_utils.update_bn(batches, ema)
            evaluate(ema, batches[0][0])

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


@healthy
def frozen_statistics(watch: Watch) -> None:
    """BatchNorm is frozen in the model, so that its average has the same statistics all along."""
    model = make_normed_model()
    for batch in make_batches(4):
        model(batch[0])
    model[1].eval()
    ema = copy.deepcopy(model).eval()
    x, _ = next(make_batches(1))

    def follow(step: int) -> None:
        follow_slowly(ema, model)
        if step % 30 == 29:
            evaluate(ema, x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


@healthy
def average_that_rarely_moves(watch: Watch) -> None:
    """An average is updated, with its statistics, less often than it is evaluated."""
    model = make_normed_model()
    ema = copy.deepcopy(model).eval()
    x, _ = next(make_batches(1))

    def follow(step: int) -> None:
        if step % 160 == 4:
            ema.load_state_dict(model.state_dict())
        if step % 30 == 29:
            evaluate(ema, x)

    train_plainly(watch, model, torch.optim.AdamW(model.parameters(), 1e-3), 220, after=follow)


@healthy
def monte_carlo_dropout(watch: Watch) -> None:
    """Evaluations average over dropout on purpose: the model is in eval mode, its dropout is not."""
    model = make_model(0.3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    make_step = watch(model, optimizer, None)
    for i, batch in enumerate(make_batches(24)):
        optimizer.zero_grad()
        compute_loss(model.train(), batch).backward()
        make_step()
        if i % 8 == 7:
            model.eval()[2].train()
            with torch.no_grad():
                torch.stack([model(batch[0]) for _ in range(4)]).mean(0)


def step_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Step:
    """The steps of a plain script."""
    del model
    if scaler is None:
        return optimizer.step
    return lambda: (scaler.step(optimizer), scaler.update())


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] in HEALTHY:
        HEALTHY[sys.argv[1]](step_plainly)
    else:
        CASES[sys.argv[1]].train(step_plainly, sys.argv[2] == "bug")
