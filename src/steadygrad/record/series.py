"""Facts -> named numbers for any tracker: `grad/*`, `update/*`, `health/*`, `action/*`, `extra/*`.

Per-parameter numbers are aggregated: a few numbers over all of them, and one norm for each of at most `MAX_BLOCKS`
parts of the model. A thousand unread curves would cost more than the training. NaN and Inf are kept: a curve that
breaks off is what the user looks for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from steadygrad.facts import NUM_COLUMNS, GradientTable, Incident, StepRecord

MAX_BLOCKS = 16
"""Most parts of the model that get their own curve."""
VALIDATION = "health/validation_loss"


def list_step(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step; missing ones are left out."""
    numbers: dict[str, float | None] = {
        "grad/norm": record.grad_norm,
        "grad/norm_after_clipping": None if record.skipped else record.grad_norm * record.clip_coefficient,
        "grad/num_nonfinite": record.num_nonfinite,
        "health/loss": record.loss,
        "health/learning_rate": max(record.learning_rates, default=None),
        "health/loss_scale": record.loss_scale,
        "action/clip_coefficient": record.clip_coefficient,
        "action/clipped": record.clipped,
        "action/skipped": record.skipped,
        "action/num_dropped_microbatches": record.num_dropped_microbatches or None,
        **{f"extra/{name}": number for name, number in record.extra.items()},
    }
    return {name: float(number) for name, number in numbers.items() if number is not None}


def list_layers(gradients: GradientTable, update_ratios: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return aggregates over all parameters of a step, and the norm of each block; empty without gradients."""
    return {**_list_gradients(gradients), **_list_ratios(update_ratios or {})}


def _list_ratios(update_ratios: Mapping[str, float]) -> dict[str, float]:
    ratios = [ratio for ratio in update_ratios.values() if math.isfinite(ratio)]
    return {"update/ratio_max": max(ratios), "update/ratio_median": statistics.median(ratios)} if ratios else {}


def _list_gradients(gradients: GradientTable) -> dict[str, float]:
    if not gradients:
        return {}
    # NaN where no norm is finite: max() and median() of nothing raise, and would switch the sink off.
    norms = list_norms(gradients) or [math.nan]
    blocks = measure_blocks(gradients)
    return {
        "grad/layer_norm_max": max(norms),
        "grad/layer_norm_median": statistics.median(norms),
        "grad/layer_norm_min": min(norms),
        # Columns as in GradientTable.row: 0 norm, 1 max_abs, 2 nonfinite, 3 nan, 4 zeros
        "grad/max_abs": max(gradients.cells[1::NUM_COLUMNS]),
        "grad/zero_share": sum(gradients.cells[4::NUM_COLUMNS]) / max(1, sum(gradients.numels)),
        "health/num_bad_layers": float(len(gradients.nonfinite())),
        **{f"grad/block/{name}": norm for name, norm in blocks.items()},
    }


def list_norms(gradients: GradientTable) -> list[float]:
    """Return one norm per parameter, over its finite elements; leave out norms that are themselves not finite."""
    return [float(norm) for norm in gradients.cells[::NUM_COLUMNS] if math.isfinite(norm)]


def measure_blocks(gradients: GradientTable) -> dict[str, float]:
    """Return part of the model -> norm, NaN if one of its gradients was not finite; as deep as `MAX_BLOCKS` allows."""
    paths = [name.split(".")[:-1] or [name] for name in gradients.names]
    depth = 1
    while depth < max(map(len, paths)) and len({tuple(path[: depth + 1]) for path in paths}) <= MAX_BLOCKS:
        depth += 1
    norms: dict[str, float] = {}
    for i, path in enumerate(paths):
        name = ".".join(path[:depth])
        row = gradients.row(i)
        # Norms are over finite elements; NaN keeps a block with a bad one from looking healthy. NaN absorbs the sum.
        norms[name] = math.hypot(norms.get(name, 0.0), math.nan if row.num_nonfinite else row.norm)
    return dict(list(norms.items())[:MAX_BLOCKS])


def describe_incident(incident: Incident) -> str:
    """Format an incident as a few lines of text that also suit Markdown."""
    finding, outcome = incident.finding, incident.outcome
    lines = [f"**step {finding.step}: {finding.kind}** ({finding.severity}): {finding.message}"]
    lines.append(f"{outcome.action}: {outcome.message}")
    if finding.advice:
        lines.append(finding.advice)
    if incident.cause is not None:
        lines.append("\n".join(f"    {line}" for line in str(incident.cause).splitlines()))
    return "\n\n".join(lines)
