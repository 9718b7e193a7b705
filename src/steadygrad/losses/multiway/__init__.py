"""The contrastive loss over M modalities, exact, without the B^M tensor.

`naive.py` is the specification. `sweep.py` (all combinations) and `fibre.py` (one vector exchanged) turn it into panels
of a matmul, which an engine sums and forgets: `tiled.py` in plain torch, `triton.py` on CUDA. `fused.py` is the sweep
there in few launches, with the kernels of `halves.py`. `similarity.py` writes each similarity as such a matmul,
`precision.py` and `layout.py` round it, `sampled.py` estimates, `scale.py` keeps the logits in range.
"""

from __future__ import annotations

from steadygrad.losses.multiway.loss import multiway_contrastive
from steadygrad.losses.multiway.scale import MultiwayScale, align_gain, spread_gain

__all__ = ["MultiwayScale", "align_gain", "multiway_contrastive", "spread_gain"]
