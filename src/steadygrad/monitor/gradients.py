"""GradientHealthMonitor: the gradients of a model -> norms, flags and advice, in plain numbers and words.

Built on the measurement that Guard uses: one pass over the gradients and one host read a check, however many
parameters there are. Looks only, except for `apply_gradient_clipping`. What it prints and what it sends to a logger
are words that people grep for: change neither lightly.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from steadygrad.clip.edit import multiply
from steadygrad.config.checks import is_number, is_positive, require_argument
from steadygrad.errors import ConfigError, UsageError
from steadygrad.facts import GradientStats, Reading
from steadygrad.measure import Meter, StepContext, Transfer
from steadygrad.measure.ranks import Ranks, find_ranks
from steadygrad.record.logger import find_sender
from steadygrad.state.shards import is_dtensor, take_local

_log = logging.getLogger("steadygrad")
HISTORY = 1000
"""Checks whose norms a GradientHealthMonitor remembers."""

_NO_GRADIENT = Reading(
    step=0,
    loss=None,
    grad_norm=0.0,
    finite_grad_norm=0.0,
    num_nonfinite=0,
    num_nan=0,
    clip_coefficient=1.0,
    skipped=False,
    learning_rates=(),
)


class GradientHealth(TypedDict):
    """What `check_gradients` returns. Norms are L2; `param_count` counts trainable tensors."""

    global_grad_norm: float
    max_grad_norm: float
    min_grad_norm: float
    mean_grad_norm: float
    has_nan: bool
    has_inf: bool
    layer_stats: dict[str, dict[str, Any]]
    recommendations: list[str]
    param_count: int
    params_with_grads: int


class GradientHealthMonitor:
    """Reports the health of a model's gradients, between `loss.backward()` and `optimizer.step()`.

    If the model is sharded (FSDP2, tensor parallelism), a check is a collective: call it on every rank. All get the
    numbers of the whole gradients, and the first one prints and logs.

    >>> model = nn.Linear(2, 1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> GradientHealthMonitor(model).check_gradients()["params_with_grads"]
    2
    """

    def __init__(
        self,
        model: nn.Module,
        grad_clip_threshold: float = 1.0,
        vanishing_threshold: float = 1e-7,
        exploding_threshold: float = 100.0,
        log_frequency: int = 100,
        enable_detailed_logging: bool = True,
    ) -> None:
        fits = isinstance(model, nn.Module)
        require_argument(
            fits, "GradientHealthMonitor.model", "be a torch.nn.Module", type(model), "Pass the model itself."
        )
        self.model = model
        self.grad_clip_threshold = grad_clip_threshold
        self.vanishing_threshold = vanishing_threshold
        self.exploding_threshold = exploding_threshold
        self.log_frequency = log_frequency
        self.enable_detailed_logging = enable_detailed_logging
        self._check_settings()
        self._meter: Meter | None = None
        self._ranks = Ranks()  # those that hold the shards
        self._measured: dict[str, nn.Parameter] = {}
        self._signature: list[tuple[Any, ...]] = []
        self.reset_statistics()

    def _check_settings(self) -> None:
        owner, low, high = "GradientHealthMonitor", self.vanishing_threshold, self.exploding_threshold
        clip, every = self.grad_clip_threshold, self.log_frequency
        require_argument(is_positive(clip), f"{owner}.grad_clip_threshold", "be above 0", clip, "Use 1.0.")
        require_argument(is_positive(high), f"{owner}.exploding_threshold", "be above 0", high, "Use 100.0.")
        fits = is_number(low) and 0 <= low < high
        rule = f"lie between 0 and exploding_threshold ({high!r})"
        require_argument(fits, f"{owner}.vanishing_threshold", rule, low, "Use 1e-7.")
        whole = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        require_argument(whole, f"{owner}.log_frequency", "be a whole number of steps, at least 1", every, "Use 100.")
        if not self._trainable():
            raise ConfigError(
                f"{owner}.model has no trainable parameter: {type(self.model).__name__}. "
                "Create the monitor after the layers are defined, and leave requires_grad=True on what is trained."
            )

    def __getstate__(self) -> dict[str, Any]:
        # Copies of a model (EMA, checkpoints) may carry a monitor along: leave behind what only this process can hold.
        return self.__dict__ | {"_meter": None, "_ranks": Ranks(), "_last": None, "_broken_logger": None}

    def reset_statistics(self) -> None:
        """Forget all checks: history, counters, the last reading, and that a logger was broken."""
        self.num_checks = 0
        self.num_checks_with_nan = 0
        self.num_checks_with_inf = 0
        self.history: dict[str, deque[float]] = {
            name: deque(maxlen=HISTORY) for name in ("global_norm", "max_norm", "min_norm")
        }
        self._last: Reading | None = None
        self._broken_logger: Any = None

    def check_gradients(self, *, scaler: torch.amp.GradScaler | None = None) -> GradientHealth:
        """Measure all gradients of trainable parameters, with one host read.

        Norms are what torch gives: NaN when a NaN is among the elements, else inf when an Inf is (a finite gradient
        whose square overflows has its true norm). `min_grad_norm` looks at the wholly finite gradients, where there
        are any. Without any gradient all norms are 0.

        `layer_stats` (empty unless `enable_detailed_logging`) has for each parameter with a gradient what the one
        pass gives: `norm`, `rms` (norm / sqrt(numel)), `max_abs`, `zero_share`, `num_nonfinite`, `num_nan`, `shape`.
        Mean and standard deviation are not among them: they would cost more passes.

        Pass `scaler` while the gradients still carry its loss scale, and leave it out after `scaler.unscale_()`.
        """
        self._last = reading = self._measure(scaler)
        health = self._judge(reading)
        self.num_checks += 1
        self.num_checks_with_nan += health["has_nan"]
        self.num_checks_with_inf += health["has_inf"]
        self.history["global_norm"].append(health["global_grad_norm"])
        self.history["max_norm"].append(health["max_grad_norm"])
        self.history["min_norm"].append(health["min_grad_norm"])
        return health

    def log_statistics(self, stats: GradientHealth, step: int | None = None, logger: Any = None) -> None:
        """Print the summary every `log_frequency` steps, and with the advice whenever something is wrong.

        `step` is the last check's own number, from 0, unless given. `logger` gets the numbers at every call: any object
        with `.log(dict, step=...)`, `.log(dict)` or `.log(name, value)`, a logger of Lightning, or TensorBoard's
        SummaryWriter; without one, the active run of wandb, if there is one. One that raises is reported once and then
        left alone.
        """
        if not self._ranks.is_first:
            return
        step = max(0, self.num_checks - 1) if step is None else step
        if step % self.log_frequency == 0 or self._is_unhealthy(stats):
            _print("\n\n".join([_summary_line(stats, step), *stats["recommendations"]]))
        logger = _find_wandb_run() if logger is None else logger
        if logger is not None:
            self._send(_flatten(stats), step, logger)

    def apply_gradient_clipping(self, max_norm: float | None = None) -> float:
        """Scale all gradients to a global norm of at most `max_norm` (`grad_clip_threshold` unless given).

        Returns the norm before, and does what `clip_grad_norm_` does, except when a gradient is not finite: there a
        coefficient of NaN would make every gradient NaN. Then all gradients are left as they are and NaN or inf is
        returned: skip that optimizer step. Under a GradScaler call `scaler.unscale_(optimizer)` first.
        """
        max_norm = self.grad_clip_threshold if max_norm is None else max_norm
        require_argument(is_positive(max_norm), "apply_gradient_clipping(max_norm)", "be above 0", max_norm, "Use 1.0.")
        norm = self._measure(None).grad_norm
        coefficient = max_norm / (norm + 1e-6)  # torch's own formula
        if math.isfinite(norm) and coefficient < 1.0:
            multiply([take_local(p.grad) for p in self._measured.values() if p.grad is not None], coefficient)
        return norm

    def get_gradient_flow_summary(self) -> dict[str, list[tuple[str, float]]]:
        """Return each parameter that had a gradient at the last check (or now, if there was none), as (name, norm).

        Three lists: `layers_with_vanishing_grads`, `layers_with_exploding_grads` (non-finite ones too) and
        `layers_with_healthy_grads`.
        """
        if self._last is None:
            self._last = self._measure(None)
        flow: dict[str, list[tuple[str, float]]] = {
            f"layers_with_{state}_grads": [] for state in ("vanishing", "exploding", "healthy")
        }
        for name, norm in _norms(self._last).items():
            if norm < self.vanishing_threshold:
                state = "vanishing"
            elif norm <= self.exploding_threshold:
                state = "healthy"
            else:  # NaN, which fails every comparison, comes here too
                state = "exploding"
            flow[f"layers_with_{state}_grads"].append((name, norm))
        return flow

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _measure(self, scaler: torch.amp.GradScaler | None) -> Reading:
        """Read the gradients. A model that was moved, cast, unfrozen or extended since then gets a new meter."""
        self._measured = self._trainable()
        # The meter holds its parameters, so no id is reused while it is compared.
        signature = [(name, id(p), p.device, p.dtype) for name, p in self._measured.items()]
        if self._meter is None or signature != self._signature:
            self._meter, self._signature = self._make_meter(), signature
        measurement = self._meter.measure(scale=_scale_of(scaler))
        if measurement is None:
            return _NO_GRADIENT
        numbers = Transfer(slots=1).send(measurement.packed).wait()
        is_bare = self._meter.lacks_gradients(numbers)
        return _NO_GRADIENT if is_bare else measurement.read(numbers, StepContext(step=self.num_checks), skipped=False)

    def _make_meter(self) -> Meter:
        named = list(self._measured.items())
        is_sharded = any(is_dtensor(parameter) for _, parameter in named)
        self._ranks = find_ranks(self.model, named) if is_sharded else Ranks()
        return Meter(named, ranks=self._ranks)

    def _judge(self, reading: Reading) -> GradientHealth:
        norms = list(_norms(reading).values()) or [0.0]
        finite = [norm for norm in norms if math.isfinite(norm)]
        # max() of a list with a NaN depends on its order, so the global norm stands in.
        largest = max(norms) if len(finite) == len(norms) else reading.grad_norm
        health = GradientHealth(
            global_grad_norm=reading.grad_norm,
            max_grad_norm=largest,
            min_grad_norm=min(finite) if finite else largest,
            mean_grad_norm=sum(norms) / len(norms),
            has_nan=reading.num_nan > 0,
            has_inf=reading.num_nonfinite > reading.num_nan,
            layer_stats=self._describe(reading) if self.enable_detailed_logging else {},
            recommendations=[],
            param_count=len(self._measured),
            params_with_grads=len(reading.gradients),
        )
        health["recommendations"] = [*self._advise(health, reading), *self._note_missing(health, reading)]
        return health

    def _describe(self, reading: Reading) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "norm": _norm(stats),
                "rms": _norm(stats) / math.sqrt(max(1, stats.numel)),
                "max_abs": stats.max_abs,
                "zero_share": stats.zero_share,
                "num_nonfinite": stats.num_nonfinite,
                "num_nan": stats.num_nan,
                "shape": tuple(self._measured[name].shape),
            }
            for name, stats in _rows(reading)
        }

    def _is_unhealthy(self, stats: GradientHealth) -> bool:
        return (
            stats["has_nan"]
            or stats["has_inf"]
            or stats["params_with_grads"] == 0
            or stats["global_grad_norm"] > self.exploding_threshold
            or stats["min_grad_norm"] < self.vanishing_threshold
        )

    def _advise(self, health: GradientHealth, reading: Reading) -> Iterator[str]:
        """Yield the advice for each thing that is wrong."""
        if health["params_with_grads"] == 0:
            yield (
                f"⚠️ No parameter has a gradient (0 of {health['param_count']})!\n"
                "   Consider: (1) Calling loss.backward() before this check, (2) Checking before optimizer.zero_grad()"
            )
            return
        bad = reading.gradients.nonfinite()
        if health["has_nan"]:
            yield (
                f"⚠️ CRITICAL: NaN gradients detected in {_list([n for n, s in bad.items() if s.num_nan])}!\n"
                "   Consider: (1) Reducing learning rate by 10x, (2) Adding epsilon to all normalizations, "
                "(3) Checking for division by zero"
            )
        if health["has_inf"]:
            yield (
                f"⚠️ CRITICAL: Inf gradients detected in {_list([n for n, s in bad.items() if s.num_inf])}!\n"
                "   Consider: (1) Reducing learning rate by 10x, (2) Gradient clipping, "
                "(3) Checking for overflow in half precision"
            )
        if health["global_grad_norm"] > self.exploding_threshold:
            yield (
                f"⚠️ Exploding gradients detected (norm={_format(health['global_grad_norm'])})!\n"
                "   Consider: (1) Gradient clipping, (2) Reducing learning rate"
            )
        if health["min_grad_norm"] < self.vanishing_threshold:
            yield (
                f"⚠️ Vanishing gradients detected (min norm={_format(health['min_grad_norm'])})!\n"
                "   Consider: (1) Using residual connections, (2) Changing activation functions"
            )

    def _note_missing(self, health: GradientHealth, reading: Reading) -> Iterator[str]:
        """Parts of a model are often idle on purpose, so this alone does not make a step unhealthy."""
        present = set(reading.gradients.names)
        missing = [name for name in self._measured if name not in present]
        if missing and health["params_with_grads"]:
            yield (
                f"ℹ️ {len(missing)} of {health['param_count']} parameters have no gradient: {_list(missing)}.\n"
                "   Consider: (1) Checking that the loss uses them, (2) Freezing them with requires_grad=False"
            )

    def _send(self, values: dict[str, float], step: int, logger: Any) -> None:
        # Before the check for a broken logger: the wrong object is a mistake of the script, which raises each time.
        send = find_sender(logger)
        if send is None:
            raise UsageError(
                f"log_statistics(logger) needs an object with .log(dict, step=...), got {type(logger).__name__}. "
                "Pass a wandb run, or any object with that method."
            )
        if logger is self._broken_logger:
            return
        try:
            send(values, step)
        except Exception as error:  # whatever a logger raises, the training goes on
            self._broken_logger = logger
            _log.warning(
                "%s.log failed at step %d with %r: it is no longer called. Fix it and call reset_statistics().",
                type(logger).__name__,
                step,
                error,
            )


def _find_wandb_run() -> Any:
    """Return the run that the script has opened with wandb.init; wandb is not imported for this."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _rows(reading: Reading) -> Iterator[tuple[str, GradientStats]]:
    for i, name in enumerate(reading.gradients.names):
        yield name, reading.gradients.row(i)


def _norm(stats: GradientStats) -> float:
    """Return the norm as torch has it: NaN or inf when an element is."""
    return math.nan if stats.num_nan else math.inf if stats.num_nonfinite else stats.norm


def _norms(reading: Reading) -> dict[str, float]:
    """Name -> norm; a parameter without elements has none that could vanish."""
    return {name: _norm(stats) for name, stats in _rows(reading) if stats.numel}


def _scale_of(scaler: torch.amp.GradScaler | None) -> Tensor | None:
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()  # get_scale() would add a host read


def _summary_line(stats: GradientHealth, step: int) -> str:
    return (
        f"Step {step} - Gradient Health: Global Norm={_format(stats['global_grad_norm'])}, "
        f"Max={_format(stats['max_grad_norm'])}, Min={_format(stats['min_grad_norm'])}, "
        f"Mean={_format(stats['mean_grad_norm'])}"
    )


def _flatten(stats: GradientHealth) -> dict[str, float]:
    """Return the numbers under the keys that dashboards show."""
    values: dict[str, float] = {
        "grad/global_norm": stats["global_grad_norm"],
        "grad/max_norm": stats["max_grad_norm"],
        "grad/min_norm": stats["min_grad_norm"],
        "grad/has_nan": int(stats["has_nan"]),
        "grad/has_inf": int(stats["has_inf"]),
    }
    for name, layer in stats["layer_stats"].items():
        values |= {f"grad_layer/{name}/{key}": value for key, value in layer.items() if key != "shape"}
    return values


def _format(value: float) -> str:
    """Two decimals where they say something, else scientific: 125.43, 3.2e-08."""
    return f"{value:.2f}" if value == 0 or 0.01 <= value < 1e6 or not math.isfinite(value) else f"{value:.1e}"


def _list(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _print(text: str) -> None:
    try:
        print(text)
    except UnicodeEncodeError:  # a terminal without Unicode must not end the training
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding))
