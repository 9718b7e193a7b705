"""Faulty traces for the rules about modes, the stream of batches, losses and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadygrad.facts import Fact
from steadygrad.facts.program import (
    LabelDependence,
    LabelScan,
    LeakedLabel,
    LossCall,
    LossScan,
    MaskScan,
    MixedAxes,
    ModeScan,
    RandomEvaluation,
    RepeatedSeed,
    SingleSample,
    StoredDataChange,
    StreamScan,
    TargetScan,
    VisibleLabel,
)

BEHIND_RELU: dict[str, Any] = {
    "op": "mse_loss",
    "fed_by": "relu",
    "low": 0,
    "high": 9,
    "lowest": -2,
    "highest": 2,
    "lost": 0.3,
}
IN_PLACE: dict[str, Any] = {
    "name": "Set.x",
    "changed_share": 1.0,
    "correlation": 1.0,
    "mean": (0, -2),
    "std": (1, 0.5),
    "by_rows": True,
}
STREAM: dict[str, Any] = {"step": 40, "tensor": "0", "num_batches": 40, "num_workers": 2, "shuffles": True}


def labels(step: int = 0, **seen: Any) -> LabelScan:
    """A scan of 64 labels of 8 samples, healthy by default."""
    values: dict[str, Any] = {"num_counted": 64, "num_classes": 9, "lowest": 0, "highest": 8, "num_rows": 8}
    return LabelScan(step=step, **(values | seen))


def sorted_labels() -> list[Fact]:
    """Ten batches of one class, then ten of another."""
    return [labels(t, num_counted=8, lowest=t // 10, highest=t // 10) for t in range(20)]


DATA_TROUBLE: dict[str, tuple[Callable[[], list[Fact]], int]] = {
    "wrong_loss_input": (lambda: [LossScan(step=0, calls=(LossCall(op="nll_loss", fed_by="softmax"),))], 0),
    "unreachable_targets": (lambda: [TargetScan(step=t, **BEHIND_RELU) for t in (0, 1, 2, 100)], 0),
    "one_element_norm": (lambda: [LossScan(step=0, one_element_norms=("group_norm",))], 0),
    "mixed_samples": (lambda: [MixedAxes(step=0, what="a reshape", kind="reshape")], 0),
    "mixed_channels": (lambda: [MixedAxes(step=0, what="a reshape", kind="channels")], 0),
    "labels_in_inputs": (lambda: [LeakedLabel(step=63, tensor="0", column=3, num_rows=1024)], 63),
    "visible_labels": (lambda: [VisibleLabel(step=2, place=6, share=0.5)], 2),
    "shifted_labels": (lambda: [labels(matches={0: 0.1, 1: 0.1, 2: 1.0})], 0),
    "padding_in_loss": (lambda: [labels(num_at_padding=32)], 0),
    "lost_ends": (lambda: [labels(num_padded_rows=8, num_lost_ends=8)], 0),
    "swapped_mask": (lambda: [MaskScan(step=0, num_swapped_rows=8)], 0),
    "dropout_in_evaluation": (lambda: [RandomEvaluation(step=20, calls=("dropout at a.py:3",))], 20),
    "norm_in_evaluation": (lambda: [RandomEvaluation(step=20, norms=("batch_norm at a.py:4",))], 20),
    "repeated_batch": (lambda: [StreamScan(pattern="repeated", period=2, **STREAM)], 1),
    "repeated_order": (lambda: [StreamScan(pattern="order", period=20, **STREAM)], 21),
    "repeated_seed": (lambda: [RepeatedSeed(step=16, seed=0, num_steps=16, repeats="dropout")], 16),
    "sorted_labels": (sorted_labels, 13),
    "constant_labels": (lambda: [labels(t, lowest=3, highest=3, is_given=True) for t in range(40)], 31),
    "changed_dataset": (lambda: [StoredDataChange(step=t, **IN_PLACE) for t in (100, 150)], 150),
    "single_row": (
        lambda: [SingleSample(step=1, tensor="1", shape=(1, 8), other="0", other_shape=(16, 8))],
        1,
    ),
}
"""Rule -> its trace, and the step that it must report."""

EVAL_MODE = ModeScan(step=3, is_evaluation=False, is_training=False, dropouts_off=2)
TRAIN_MODE = {
    t: ModeScan(step=t, is_evaluation=True, is_first=False, is_training=True, dropouts_on=2) for t in (20, 40)
}
DEPENDENCE = LabelDependence(step=70, num_samples=2048, spread=10.1, shuffled_mean=10.0, shuffled_std=1.0, entropy=1.0)
"""Default readings for traces that need readings of steps."""
