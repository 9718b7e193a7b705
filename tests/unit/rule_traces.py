"""Made-up runs for the tests of rules: healthy ones that look suspicious, and one trace of trouble for each rule.

A trace is a list of Facts in the order in which a Guard tells them. Everything is seeded.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from data_traces import DATA_TROUBLE, DEPENDENCE, EVAL_MODE, TRAIN_MODE
from program_traces import PROGRAM_TROUBLE

from steadygrad.config import DetectConfig
from steadygrad.detect import Rule, standard_rules
from steadygrad.facts import (
    Action,
    ActionTaken,
    ActivationScan,
    ActivationStats,
    Broadcast,
    EpochEnd,
    Fact,
    Finding,
    GradientTable,
    GraphScan,
    InputScan,
    InputStats,
    ParameterScan,
    Reading,
    Severity,
    Validation,
)

NAMES = tuple(f"layer{i // 2}.{'bias' if i % 2 else 'weight'}" for i in range(12))
NUMELS = tuple(8 if i % 2 else 64 for i in range(12))
RATE = 1e-3


def table(norms: Sequence[float], zeros: Sequence[float] = ()) -> GradientTable:
    """Statistics of twelve parameters, finite; `zeros` are shares."""
    zeros = zeros or [0.0] * len(norms)
    cells: list[float] = []
    for norm, share, numel in zip(norms, zeros, NUMELS):
        cells += [norm, norm, 0, 0, share * numel]
    return GradientTable(NAMES, NUMELS, cells)


def reading(step: int, loss: float | None = 1.0, norm: float = 0.5, **changes: Any) -> Reading:
    """A healthy step, unless told otherwise."""
    per_parameter = norm / math.sqrt(len(NAMES)) if math.isfinite(norm) else 0.0
    values: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "finite_grad_norm": norm if math.isfinite(norm) else 0.0,
        "num_nonfinite": 0,
        "num_nan": 0,
        "clip_coefficient": 1.0,
        "skipped": False,
        "learning_rates": (RATE,),
        "gradients": table([per_parameter] * len(NAMES)),
    }
    return Reading(**(values | changes))


def poisoned(step: int, value: float) -> Reading:
    """A step whose loss and gradients are not finite; it was skipped."""
    cells = [0.0, 0.0, 3, 3 if math.isnan(value) else 0, 0.0] * len(NAMES)
    return reading(
        step,
        value,
        finite_grad_norm=0.0,
        grad_norm=value,
        num_nonfinite=36,
        num_nan=36 if math.isnan(value) else 0,
        skipped=True,
        gradients=GradientTable(NAMES, NUMELS, cells),
        adam_rms=dict.fromkeys(NAMES, value),
        update_ratios=dict.fromkeys(NAMES, value),
        update_norm=value,
    )


def rule_named(name: str, config: DetectConfig | None = None) -> Rule:
    """A fresh standard rule."""
    return next(r for r in standard_rules(config or DetectConfig(), clip_threshold=1.0) if r.name == name)


def findings_of(rule: Rule, facts: Iterable[Fact]) -> list[Finding]:
    """Everything that one rule says about a trace."""
    return [finding for fact in facts for finding in rule.observe(fact)]


def findings_with_a_restart(make: Callable[[], Rule], facts: Sequence[Fact], cut: int) -> list[Finding]:
    """The same, with the rule saved as JSON and restored into a fresh one after `cut` facts."""
    first = make()
    said = findings_of(first, facts[:cut])
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return said + findings_of(second, facts[cut:])


# --- healthy runs ----------------------------------------------------------------------------------------------------


def _decay(step: int) -> float:
    return 2.7 + 8.3 * math.exp(-step / 100)


def _run(
    seed: str,
    loss: Callable[[random.Random, int], float],
    *,
    norm: Callable[[random.Random, int], float] = lambda r, t: 0.5 * math.exp(0.2 * r.gauss(0, 1)),
    rate: Callable[[int], float] = lambda t: RATE,
    num_steps: int = 500,
) -> list[Fact]:
    """Readings with looks every ten steps, validations every fifty, and an epoch every hundred."""
    r = random.Random(seed)
    facts: list[Fact] = [ParameterScan(step=-1, nonfinite_buffers={"observer.low": 1}), GraphScan(step=0)]
    for t in range(num_steps):
        facts += _looks(r, t) if t % 10 == 0 else []
        measured = {n: abs(1 + 0.1 * r.gauss(0, 1)) for n in NAMES} if t % 10 == 0 else None
        moved = rate(t) * math.exp(0.1 * r.gauss(0, 1))
        facts.append(
            reading(
                t,
                loss(r, t),
                norm(r, t),
                learning_rates=(rate(t),),
                adam_rms=measured,
                update_norm=moved if measured else None,
                update_ratios={n: moved * (1 + 0.1 * r.random()) for n in NAMES} if measured else None,
            )
        )
        if t % 50 == 49:
            facts.append(Validation(step=t, epoch=t // 100, loss=_decay(t) + 0.1 * r.gauss(0, 1)))
        if t % 100 == 99:
            facts.append(EpochEnd(step=t, epoch=t // 100, train_loss=_decay(t)))
    return facts


def _looks(r: random.Random, t: int) -> list[Fact]:
    largest = math.exp(1.0 + 0.3 * r.gauss(0, 1))
    labels = InputStats(numel=64, num_ignored=32, is_floating=False)
    mask = InputStats(numel=64, num_zeros=r.randrange(50), is_binary=True, max_abs=1.0)
    additive = InputStats(numel=64, num_nonfinite=20, max_abs=0.0)  # -inf where attention must not look
    modules = {"act": ActivationStats(dead_share=0.1 + 0.1 * r.random(), saturated_share=0.1 * r.random())}
    return [
        InputScan(step=t, tensors={"x": InputStats(numel=64, max_abs=largest), "y": labels, "m": mask, "a": additive}),
        ActivationScan(step=t, modules=modules, output_std=0.5 + 0.1 * r.random(), output_scale=1.0),
        ParameterScan(step=t - 1, num_changed=12),
    ]


def _student_t(r: random.Random) -> float:
    return r.gauss(0, 1) / math.sqrt(r.gammavariate(1.5, 2.0) / 3.0)


def _restart_rate(t: int) -> float:
    return RATE * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * (t % 125) / 125)))


def _restart_loss(r: random.Random, t: int) -> float:
    bump = 0.6 * math.exp(-(t % 125) / 30) * (t >= 125)  # up by a fifth within a few steps, then down again
    return _decay(t) + bump * min(1.0, (t % 125) / 5) + 0.03 * r.gauss(0, 1)


def _restart_norm(r: random.Random, t: int) -> float:
    jump = 6.0 if t >= 125 and t % 125 < 20 else 1.0
    return 0.3 * jump * math.exp(0.05 * r.gauss(0, 1))


HEALTHY: dict[str, Callable[[], list[Fact]]] = {
    "gaussian noise": lambda: _run("g", lambda r, t: _decay(t) + 0.03 * r.gauss(0, 1)),
    "heavy tails": lambda: _run("t", lambda r, t: _decay(t) + 0.03 * _student_t(r)),
    "batches of one sample": lambda: _run(
        "c",
        lambda r, t: _decay(t) * r.gauss(0, 1) ** 2,
        norm=lambda r, t: 5.0 * abs(r.gauss(0, 1)) + 1e-3,
    ),
    "a first norm of 231": lambda: _run(
        "n", lambda r, t: _decay(t) + 0.03 * r.gauss(0, 1), norm=lambda r, t: 0.5 + 230.5 * math.exp(-t / 20)
    ),
    "a warm-up bump": lambda: _run(
        "w",
        lambda r, t: 2.0 + 0.2 * math.exp(-(((t - 30) / 10) ** 2)) - 0.002 * max(0, t - 40) + 0.01 * r.gauss(0, 1),
        norm=lambda r, t: 0.5 + 4.0 * math.exp(-(((t - 30) / 10) ** 2)),
        rate=lambda t: RATE * min(1.0, t / 60),
    ),
    "learning-rate restarts": lambda: _run("r", _restart_loss, norm=_restart_norm, rate=_restart_rate),
    "learning-rate drops": lambda: _run(
        "d",
        lambda r, t: _decay(t) + 0.5 * (t < 200) + 0.3 * (t < 350) + 0.03 * r.gauss(0, 1),
        rate=lambda t: RATE * (1.0 if t < 200 else 0.1 if t < 350 else 0.01),
    ),
    "a margin loss that is mostly satisfied": lambda: _run(
        "m", lambda r, t: max(0.0, 0.5 * math.exp(-t / 150) + 0.2 * r.gauss(0, 1) * math.exp(-t / 300))
    ),
}


# --- one trace of trouble for each rule ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A trace, and what the rule must say about it: the first finding of this severity, at this step."""

    facts: Callable[[], list[Fact]]
    step: int
    severity: Severity = Severity.WARNING
    kind: str | None = None


def _steps(num: int, make: Callable[[int], Reading]) -> list[Fact]:
    return [make(t) for t in range(num)]


def _noisy(t: int, seed: int = 0) -> float:
    return 1.0 + 0.02 * random.Random(f"{seed}/{t}").gauss(0, 1)


def _healthy_then(at: int, event: Callable[[int], Reading], num: int, **healthy: Any) -> list[Fact]:
    return _steps(num, lambda t: event(t) if t >= at else reading(t, _noisy(t), 0.5 * _noisy(t, 1), **healthy))


def _scans(num: int, make: Callable[[int], Fact]) -> list[Fact]:
    return [make(t) for t in range(num)]


def _inputs(t: int, **changes: Any) -> InputScan:
    return InputScan(step=t, tensors={"x": InputStats(**({"numel": 8, "max_abs": _noisy(t)} | changes))})


def _modules(t: int, **shares: float) -> ActivationScan:
    return ActivationScan(step=t, modules={"act": ActivationStats(**shares)}, output_std=0.5, output_scale=1.0)


def _fading(t: int) -> Reading:
    return reading(t, gradients=table([10.0 ** (-12 + i) for i in range(12)]))


def _with_looks(t: int, far: bool) -> Reading:
    big = 40.0 if far else 1.0
    return reading(
        t,
        adam_rms={n: 0.9 * big * _noisy(t, i) for i, n in enumerate(NAMES)},
        update_norm=RATE * big * _noisy(t, 1),
        update_ratios={n: RATE * big * _noisy(t, i) for i, n in enumerate(NAMES)},
    )


def _overfit(t: int) -> list[Fact]:
    train = reading(t, 2.0 * math.exp(-t / 10))
    return [train, Validation(step=t, epoch=t, loss=1.0 + 0.02 * (t - 10) ** 2 / 10)]


TROUBLE: dict[str, Trouble] = {
    "nonfinite_loss": Trouble(
        facts=lambda: _healthy_then(40, lambda t: reading(t, math.nan), 42), step=40, severity=Severity.ERROR
    ),
    "nonfinite_gradient": Trouble(
        facts=lambda: _healthy_then(40, lambda t: reading(t, num_nonfinite=3, skipped=True), 41),
        step=40,
        severity=Severity.ERROR,
    ),
    "nonfinite_rate": Trouble(
        facts=lambda: _healthy_then(40, lambda t: reading(t, bad_rates={0: math.nan}, skipped=True), 41),
        step=40,
        severity=Severity.ERROR,
    ),
    "nonfinite_parameter": Trouble(
        facts=lambda: [ParameterScan(step=7), ParameterScan(step=8, nonfinite_parameters={"w": 2})],
        step=8,
        severity=Severity.CRITICAL,
    ),
    "nonfinite_buffer": Trouble(
        facts=lambda: [ParameterScan(step=-1), ParameterScan(step=8, nonfinite_buffers={"norm.running_var": 2})],
        step=8,
        severity=Severity.ERROR,
    ),
    "nonfinite_input": Trouble(
        facts=lambda: [reading(0), reading(1, math.nan), _inputs(1, num_nonfinite=1)], step=1, severity=Severity.ERROR
    ),
    "nonfinite_validation": Trouble(
        facts=lambda: [Validation(step=9, epoch=0, loss=math.inf)], step=9, severity=Severity.ERROR
    ),
    "nonfinite_epoch": Trouble(
        facts=lambda: [EpochEnd(step=9, epoch=0, train_loss=math.nan)], step=9, severity=Severity.ERROR
    ),
    "rate_too_high": Trouble(
        facts=lambda: _steps(24, lambda t: reading(t, 2.9 * _noisy(t) * 1.3**t, 0.5 * 1.2**t)),
        step=1,  # the eighth above three times the first two
        severity=Severity.ERROR,
    ),
    "loss_spike": Trouble(facts=lambda: _healthy_then(300, lambda t: reading(t, 1.4), 301), step=300),
    "loss_explosion": Trouble(
        facts=lambda: _healthy_then(60, lambda t: reading(t, 15.0 * _noisy(t)), 90), step=60, severity=Severity.ERROR
    ),
    "divergence": Trouble(
        facts=lambda: _steps(400, lambda t: reading(t, _noisy(t) + (2.0 - t / 100 if t < 200 else (t - 200) / 100))),
        step=208,
    ),
    "loss_plateau": Trouble(
        facts=lambda: _steps(1300, lambda t: reading(t, _noisy(t))), step=63, severity=Severity.INFO
    ),
    "zero_loss": Trouble(facts=lambda: _healthy_then(20, lambda t: reading(t, 0.0, 0.0), 21), step=20),
    "overfitting": Trouble(facts=lambda: [f for t in range(20) for f in _overfit(t)], step=11),
    "exploding_gradient": Trouble(facts=lambda: _healthy_then(100, lambda t: reading(t, 1.0, 50.0), 101), step=100),
    "high_gradient_norm": Trouble(
        facts=lambda: _healthy_then(100, lambda t: reading(t, 1.0, 7.6), 101), step=100, severity=Severity.INFO
    ),
    "rising_norm": Trouble(
        facts=lambda: _steps(640, lambda t: reading(t, _noisy(t) + t / 1000, math.exp(t / 200))), step=64
    ),
    "vanishing_gradient": Trouble(facts=lambda: _steps(8, _fading), step=0),
    "dead_units": Trouble(
        facts=lambda: _healthy_then(
            30, lambda t: reading(t, gradients=table([0.0, 0.0] + [0.1] * 10, [1.0, 1.0] + [0.0] * 10)), 45
        ),
        step=30,
    ),
    "zero_gradient": Trouble(facts=lambda: _healthy_then(20, lambda t: reading(t, 1.5, 0.0), 50), step=20),
    "missing_gradient": Trouble(
        facts=lambda: _steps(12, lambda t: reading(t, missing=NAMES[:8], missing_share=0.6)), step=0
    ),
    "stale_gradient": Trouble(facts=lambda: [reading(0), reading(1, stale=NAMES), reading(2, stale=NAMES)], step=1),
    "adam_rms": Trouble(facts=lambda: _steps(42, lambda t: _with_looks(t, t >= 40)), step=41),
    "update_norm": Trouble(facts=lambda: _steps(41, lambda t: _with_looks(t, t == 40)), step=40),
    "update_ratio": Trouble(facts=lambda: _steps(41, lambda t: _with_looks(t, t == 40)), step=40),
    "outlier_input": Trouble(
        facts=lambda: _scans(40, lambda t: _inputs(t, max_abs=1000.0) if t == 39 else _inputs(t)), step=39
    ),
    "all_labels_masked": Trouble(
        facts=lambda: [
            fact
            for t in range(10)
            for fact in (
                InputScan(step=t, tensors={"y": InputStats(numel=8, num_ignored=8 if t == 3 else 2)}),
                poisoned(t, math.nan) if t == 3 else reading(t),
            )
        ],
        step=3,
    ),
    "dead_activation": Trouble(
        facts=lambda: _scans(9, lambda t: _modules(t, dead_share=0.95 if t >= 5 else 0.1)), step=5, kind="dead_units"
    ),
    "saturated_activation": Trouble(
        facts=lambda: _scans(9, lambda t: _modules(t, saturated_share=0.9 if t >= 5 else 0.0)), step=5
    ),
    "constant_output": Trouble(
        facts=lambda: _scans(
            9, lambda t: ActivationScan(step=t, output_std=0.0 if t >= 5 else 0.4 + 0.01 * t, output_scale=1.0)
        ),
        step=5,
    ),
    "unchanged_parameter": Trouble(
        facts=lambda: _scans(6, lambda t: ParameterScan(step=10 * t, unchanged=("head.weight",), num_changed=5)), step=0
    ),
    "unregistered_layers": Trouble(facts=lambda: [GraphScan(step=0, hidden=("blocks[0].weight",))], step=0),
    "silent_broadcast": Trouble(
        facts=lambda: [GraphScan(step=0, broadcasts=(Broadcast(op="sub", left=(32, 1), right=(32,)),))], step=0
    ),
    "double_softmax": Trouble(facts=lambda: [GraphScan(step=0, double_softmaxes=("train.py:12",))], step=0),
    "anomaly_mode_left_on": Trouble(
        facts=lambda: [GraphScan(step=0, anomaly_mode=True)], step=0, severity=Severity.INFO
    ),
    "scaler_collapse": Trouble(
        facts=lambda: _steps(
            20,
            lambda t: reading(t, loss_scale=4096.0 / 2 ** max(0, t - 5), num_nonfinite=int(t >= 5), skipped=t >= 5),
        ),
        step=5,
        severity=Severity.ERROR,
    ),
    "frequent_clipping": Trouble(
        facts=lambda: _steps(120, lambda t: reading(t, clip_coefficient=0.5 if t % 4 else 1.0)),
        step=99,
        severity=Severity.INFO,
    ),
    "many_skips": Trouble(
        facts=lambda: _steps(60, lambda t: poisoned(t, math.nan) if t % 5 == 4 else reading(t)), step=4
    ),
    "frequent_actions": Trouble(
        facts=lambda: [ActionTaken(step=100 * i, action=Action.SKIP) for i in range(6)], step=400
    ),
    "vanished_rate": Trouble(facts=lambda: _steps(80, lambda t: reading(t, learning_rates=(0.0,))), step=0),
    **{name: Trouble(facts=facts, step=step) for name, (facts, step) in PROGRAM_TROUBLE.items()},
    "eval_while_training": Trouble(facts=lambda: [EVAL_MODE, *_steps(20, reading)], step=3),
    "train_mode_validation": Trouble(
        facts=lambda: [fact for t in range(50) for fact in (*([TRAIN_MODE[t]] if t in TRAIN_MODE else ()), reading(t))],
        step=40,
    ),
    "independent_labels": Trouble(facts=lambda: [*_steps(70, reading), DEPENDENCE], step=70),
    "eps_gradient": Trouble(facts=lambda: [reading(0, norm=1e11), *_steps(20, reading)], step=0),
    **{name: Trouble(facts=facts, step=step) for name, (facts, step) in DATA_TROUBLE.items()},
}
