"""Nothing is NaN, but something is wrong: norms that grow or vanish from layer to layer, dead units."""

from __future__ import annotations

from steadygrad.diagnose.explanations.entry import STEP, Entry
from steadygrad.diagnose.explanations.evidence import show_largest

PHASES = (*STEP, "optimizer", "parameter", "input")

ENTRIES = (
    Entry(
        name="exploding_signal",
        phases=PHASES,
        kinds=("exploding",),
        why="the norm grows by a factor above 1 in each layer, so it grows exponentially with depth",
        evidence=show_largest(),
        fixes=(
            "nn.init.kaiming_normal_(layer.weight)",
            "nn.init.orthogonal_(layer.weight)",
            "nn.LayerNorm(layer.out_features)",
        ),
    ),
    Entry(
        name="vanishing_signal",
        phases=PHASES,
        kinds=("vanishing",),
        why="the norm shrinks by a factor below 1 in each layer, so early layers receive almost nothing",
        evidence=show_largest(),
        fixes=(
            "nn.init.kaiming_normal_(layer.weight)",
            "nn.init.orthogonal_(layer.weight)",
            "nn.LayerNorm(layer.out_features)",
        ),
    ),
    Entry(
        name="dead_units",
        phases=PHASES,
        kinds=("dead",),
        why="the units are 0 for the whole batch: through a ReLU no gradient reaches them, so they stay at 0",
        evidence=show_largest(),
        fixes=("F.leaky_relu(x, 0.01)", "F.gelu(x)", "F.relu(F.layer_norm(x, x.shape[-1:]))"),
    ),
)
