"""Cures for half precision."""

from __future__ import annotations

from .cure import Cure, half, t

CURES = {
    "cast_overflow": Cure(
        broken="x.to(torch.float16)",
        also=("x.half()",),
        sick={"x": t(1e6, 1)},
        healthy={"x": t(2, 1)},
        differs={"F.layer_norm(x, x.shape[-1:]).to(torch.float16)": "normalises x"},
        tolerance=1e-2,
    ),
    "elementwise_overflow_in_half": Cure(
        broken="x * y",
        also=(
            "x * 1000",
            "x + 65504",
        ),
        sick={"x": half(1000, 1), "y": half(1000, 2)},
        healthy={"x": half(2, 1)},
        learned=("x", "y"),
        differs={"(x / 256) * (y / 256)": "is smaller by 65536; scale the result back in float32"},
        tolerance=1e-2,
    ),
    "elementwise_overflow": Cure(
        broken="x * y",
        also=("x * 1e20", "(x * 3e18 + x * 3e18).sum()", "x.var()"),
        sick={"x": t(1e20, 2), "y": t(1e20, 3)},
        healthy={"x": t(1, 2), "y": t(1, 3)},
        learned=("x", "y"),
        differs={"torch.tanh(x) * torch.tanh(y)": "keeps each factor within 1"},
    ),
    "gradient_overflow_in_half": Cure(
        broken="scale * loss(x)",
        sick={"x": half(1, 2), "scale": 2.0**16, "loss": lambda x: (x * 8.0).float().mean()},
        healthy={"scale": 2.0**10},
        differs={"loss(x) * (scale / 256)": "scales less", "loss(x.to(torch.bfloat16))": "needs no scale"},
    ),
}
