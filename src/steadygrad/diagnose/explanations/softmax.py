"""Softmax and attention: fully masked rows, masks that add up to -inf, scores that float16 cannot hold."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    LARGEST,
    either,
    goes_to,
    has_infs,
    has_scalar,
    in_dtype,
    in_module,
    reaches,
)
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_infs, show_largest, show_scalar

ATTENTION = (
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_math",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_for_cpu",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_fused_attention_overrideable",
)
PRODUCTS = ("mm", "bmm", "matmul", "baddbmm", "addmm")
BEYOND_HALF = either(*(has_scalar(name, lambda number: abs(number) > LARGEST["float16"]) for name in ("other", "self")))

ENTRIES = (
    Entry(
        name="softmax_over_nothing",
        ops=("softmax",),
        phases=FORWARD,
        why="every element of a row is masked with -inf, and softmax of nothing is 0 / 0",
        evidence=count_infs(),
        fixes=(
            "torch.softmax(x.masked_fill(~mask, torch.finfo(x.dtype).min), dim=-1)",
            "steadygrad.losses.safe_softmax(x, dim=-1, mask=mask)",
            "torch.softmax(x.masked_fill(~mask & mask.any(-1, keepdim=True), -torch.inf), dim=-1) * mask",
        ),
    ),
    Entry(
        name="log_softmax_over_nothing",
        ops=("log_softmax",),
        phases=FORWARD,
        why="every element of a row is masked with -inf, and log_softmax of nothing is -inf + inf",
        evidence=count_infs(),
        fixes=(
            "F.log_softmax(x.masked_fill(~mask, torch.finfo(x.dtype).min), dim=-1)",
            "steadygrad.losses.safe_log_softmax(x, dim=-1, mask=mask)",
        ),
    ),
    Entry(
        name="padding_hides_every_key",
        ops=("softmax",),
        phases=FORWARD,
        conditions=(has_infs(), in_module("MultiheadAttention")),
        why="the key padding mask hides every key of a sample in MultiheadAttention, and softmax of nothing is 0 / 0",
        evidence=count_infs(),
        fixes=(
            "attention(x, x, x, key_padding_mask=padding & ~padding.all(-1, keepdim=True))[0]",
            "attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]",
        ),
    ),
    Entry(
        name="attention_over_nothing",
        ops=("softmax",),
        phases=FORWARD,
        conditions=(has_infs(), goes_to("bmm", "mm", "matmul")),
        why="a query may attend to no key at all, and softmax of nothing is 0 / 0",
        evidence=count_infs(),
        fixes=(
            "F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
            "steadygrad.losses.safe_softmax(q @ k.mT / q.shape[-1] ** 0.5, mask=mask) @ v",
            "F.scaled_dot_product_attention(q, k, v, attn_mask=mask.logical_or(~mask.any(-1, keepdim=True)))",
        ),
    ),
    Entry(
        name="attention_overflow",
        ops=ATTENTION,
        phases=FORWARD,
        why="the attention scores q @ k leave the range of the dtype, and inf - inf inside softmax is NaN",
        evidence=show_largest(0, 1),
        fixes=(
            "F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)",
            "F.scaled_dot_product_attention(q.clamp(-1e4, 1e4), k.clamp(-1e4, 1e4), v)",
        ),
    ),
    Entry(
        name="attention_scores_overflow_in_half",
        ops=PRODUCTS,
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF), goes_to("softmax", "safe_softmax")),
        why="the attention scores q @ k exceed 65504 in float16 before they are scaled",
        evidence=show_largest(0, 1),
        fixes=(
            "(q * q.shape[-1] ** -0.5) @ k.mT",
            "F.normalize(q.float(), dim=-1) @ F.normalize(k.float(), dim=-1).mT",
            "q.to(torch.bfloat16) @ k.to(torch.bfloat16).mT",
        ),
    ),
    Entry(
        name="masks_add_up_to_infinity",
        ops=("add", "sub"),
        phases=FORWARD,
        kinds=("inf",),
        # finfo.min of float32 and bfloat16 is -3.4e38
        conditions=(reaches(1e38), goes_to("softmax", "log_softmax", "safe_softmax")),
        why="two masks of finfo.min were added: their sum is -inf, and a row of them NaN after softmax",
        evidence=show_largest(0, 1),
        fixes=(
            "x.masked_fill(~(mask & causal), torch.finfo(x.dtype).min)",
            "x.masked_fill(~mask, -1e4) + torch.zeros_like(x).masked_fill(~causal, -1e4)",
        ),
    ),
    Entry(
        name="mask_constant_overflow_in_half",
        ops=("mul", "add", "sub"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF), BEYOND_HALF),
        why="the constant is larger than float16 can hold, which ends at 65504: a mask of -1e9 is -inf there",
        evidence=show_scalar("other"),
        fixes=("x.masked_fill(~mask, torch.finfo(x.dtype).min)", "x + (~mask) * -1e4"),
    ),
)
