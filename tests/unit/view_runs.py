"""Runs for the views, written by the recorder itself, so that views are tested on real records."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from steadygrad.facts import Action, Cause, Finding, GradientTable, Incident, Outcome, Severity, StepRecord, Verdict
from steadygrad.record import RunDirectory

NAMES = [
    "embed.weight",
    *(f"blocks.{i}.{part}" for i in range(4) for part in ("attention.weight", "attention.bias", "mlp.weight")),
    "head.weight",
]
HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>bold</b>&amp;\u2028'
CONFIG = {"clip": {"kind": "fixed_norm", "max_norm": 1.0}, "on_nonfinite": "skip", "record": {"layers_every": 10}}


def open_directory(path: Path, *, names: list[str] = NAMES, config: dict[str, Any] = CONFIG) -> RunDirectory:
    return RunDirectory(path, config=config, parameters=names, versions={"steadygrad": "0.1", "torch": "2.13.0"})


def make_step(step: int, **changes: Any) -> StepRecord:
    noise = random.Random(step)
    norm = changes.get("grad_norm", 0.8 * 10 ** noise.gauss(0, 0.15))
    skipped = changes.get("skipped", False)
    coefficient = 1.0 if skipped or not math.isfinite(norm) else min(1.0, 1.0 / norm)
    healthy = {
        "step": step,
        "loss": 2.0 + 8.0 * math.exp(-step / 150) + noise.gauss(0, 0.12),
        "grad_norm": norm,
        "clip_coefficient": coefficient,
        "clipped": coefficient < 1.0,
        "skipped": skipped,
        "num_nonfinite": 0,
        "learning_rates": (3e-4 * min(1.0, (step + 1) / 50),),
        "loss_scale": None,
        "num_microbatches": 1,
        "num_dropped_microbatches": 0,
        "time_seconds": step * 0.25,
    }
    return StepRecord(**{**healthy, **changes})


def make_gradients(step: int, *, names: list[str] = NAMES, bad: str | None = None) -> GradientTable:
    """Norms that shrink towards the input; the first block vanishes from step 300 on."""
    noise = random.Random(-step)
    cells: list[float] = []
    for i, name in enumerate(names):
        exponent = -2.2 + 1.6 * i / len(names) + noise.gauss(0, 0.15)
        if step >= 300 and name.startswith("blocks.0."):
            exponent -= min(4.5, (step - 300) / 60)
        cells += [10**exponent, 10**exponent / 3, 1 if name == bad else 0, 0, 0]
    return GradientTable(tuple(names), (100,) * len(names), cells)


def make_incident(
    step: int, *, kind: str = "nonfinite_loss", severity: Severity = Severity.ERROR, cause: Cause | None = None,
    action: Action = Action.SKIP, message: str = "the loss is NaN", did: str = "the step was skipped",
) -> Incident:  # fmt: skip
    finding = Finding(
        kind=kind,
        severity=severity,
        step=step,
        message=message,
        advice="Add an epsilon before the square root.",
        evidence={"loss": math.nan, "grad_norm": 12.5},
    )
    verdict = Verdict(action=action, reason="it must not reach a weight")
    return Incident(
        step=step, finding=finding, verdict=verdict, outcome=Outcome(action=action, message=did), cause=cause
    )


CAUSE = Cause(
    kind="nan",
    phase="backward",
    op="aten.sqrt",
    module="blocks.1.attention",
    file="/home/me/project/model.py",
    line=41,
    source="scale = x.var(dim=-1).sqrt()",
    inputs=("x: float32 [8, 64], min 0, max 3.1, 12 zeros",),
    explanation="The derivative of sqrt(x) is 1 / (2 sqrt(x)), which is Inf at 0; times a zero gradient it is NaN.",
    fixes=("x.var(dim=-1).add(1e-6).sqrt()", "torch.nn.LayerNorm(64)"),
    chain=("aten.sqrt at model.py:41", "blocks.1.attention", "loss"),
    reproducible="the same NaN again",
    symptom="NaN gradient",
    name="sqrt_at_zero",
    node="SqrtBackward0",
    caller="train.py:12   loss = model(x)",
    samples=(3, 7),
    samples_note="2 of 8: the constant ones",
    terms=("main 2.31", "auxiliary NaN"),
    growth=None,
    step=200,
    rank=0,
    batch="batches/step-200.safetensors",
    note="one replay only",
)


def write_run(path: Path, num_steps: int = 600, *, names: list[str] = NAMES, calm: bool = False) -> Path:
    """Write a run with everything in it (NaN step, spikes, vanishing block, lower rate, rollback) or a quiet one."""
    run = open_directory(path, names=names)
    for step in range(num_steps):
        if not calm and step == 200:
            run.write_step(make_step(step, loss=math.nan, grad_norm=math.nan, skipped=True, num_nonfinite=64))
            run.write_layers(step, make_gradients(step, names=names, bad=names[5 % len(names)]))
            run.write_incident(make_incident(step, cause=CAUSE))
            continue
        lower = 1.0 if calm or step < 350 else 0.5
        record = make_step(step)
        spike = not calm and step in (120, 340)
        run.write_step(
            make_step(
                step,
                loss=record.loss + (9.0 if spike else 0.0),
                learning_rates=(record.learning_rates[0] * lower,),
                **({"grad_norm": 60.0} if spike else {}),
            )
        )
        if step % 10 == 0:
            run.write_layers(step, make_gradients(step if not calm else 0, names=names))
        if not calm and step == 350:
            run.write_incident(
                make_incident(
                    step,
                    kind="loss_explosion",
                    severity=Severity.CRITICAL,
                    action=Action.SCALE_LR,
                    message="the loss rose from 2.9 to 12",
                    did="learning rate 3e-4 -> 1.5e-4",
                )
            )
        if not calm and step == 420:
            run.write_incident(
                make_incident(
                    step,
                    kind="loss_divergence",
                    severity=Severity.WARNING,
                    action=Action.ROLLBACK,
                    message="the loss has been rising for 64 steps",
                    did="back to step 400",
                )
            )
    run.close()
    return path


def add_update_ratios(path: Path) -> None:
    """Add what a recorder with ratios writes next to the gradients."""
    lines = [json.loads(line) for line in (path / "layers.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        noise = random.Random(line["step"])
        line["update_ratios"] = {name: 10 ** noise.gauss(-3, 0.3) for name in line["gradients"]}
    (path / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
