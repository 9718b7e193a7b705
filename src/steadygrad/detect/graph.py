"""Rules about the program, checked once: they need no threshold that could be wrong.

These are facts about the code, not distances, so the certain ones are warnings at once.
"""

from __future__ import annotations

import math

from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import Broadcast, Finding, GraphScan, Severity
from steadygrad.facts.program import LossScan
from steadygrad.words import spell_count


class UnregisteredLayers(OnceRule[GraphScan]):
    """Parameters take part in the loss but are never updated.

    Layers in a plain list, or an optimizer created before the model was modified (it holds parameters that the model no
    longer has), are mistakes: a warning. Parameters simply left out of the optimizer may be intended: an info.
    """

    name = "unregistered_layers"
    hears = (GraphScan,)

    def judge(self, fact: GraphScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if not (fact.hidden or fact.unoptimized):
            return None
        mistake = bool(fact.hidden) or bool(fact.foreign)
        names = list(fact.hidden) or list(fact.unoptimized)
        return self.report(
            severity=Severity.WARNING if mistake else Severity.INFO,
            step=fact.step,
            message=f"{spell_count(len(names), 'parameter')} in the loss and in no optimizer: {show(names)}"
            + (f"; {len(fact.foreign)} of the optimizer are not in the model" if fact.foreign else ""),
            advice="Keep layers in nn.ModuleList or nn.ModuleDict."
            if fact.hidden
            else "Create the optimizer after the model is complete, or freeze these with requires_grad_(False).",
            evidence={"parameters": names[:SHOWN], "num_parameters": len(names), "num_foreign": len(fact.foreign)},
        )


class SilentBroadcast(OnceRule[GraphScan | LossScan]):
    """A prediction (N, 1) met a target (N,), and the loss is over all N x N pairs: the model learns the mean."""

    name = "silent_broadcast"
    hears = (GraphScan, LossScan)

    def judge(self, fact: GraphScan | LossScan) -> Finding | None:
        """Return the finding about the first such pair, with its shapes."""
        for one in fact.broadcasts if isinstance(fact, GraphScan) else _find_expanded(fact):
            if _is_silent(one):
                return self.report(
                    step=fact.step,
                    message=f"{one.op} of shapes {one.left} and {one.right} compares every sample with every other"
                    f"{at(one.where)}",
                    advice="Give both the same shape: target.unsqueeze(1) or prediction.squeeze(1).",
                    evidence={"left": list(one.left), "right": list(one.right), "where": one.where},
                )
        return None


def _find_expanded(scan: LossScan) -> list[Broadcast]:
    """Return the losses whose prediction (N, 1) was expanded to (N, N): the target was (N,)."""
    return [
        Broadcast(
            op=call.op, left=call.expanded_from, right=call.expanded_to[:-2] + call.expanded_to[-1:], where=call.where
        )
        for call in scan.calls
        if len(call.expanded_from) == len(call.expanded_to) == 2
        and call.expanded_from[:-1] == call.expanded_to[:-1]
        and call.expanded_from[-1] == 1
    ]


def _is_silent(one: Broadcast) -> bool:
    """(N, 1) with (N,): the ranks differ, and the sizes that matter are the same. An outer product names its axes."""
    left, right = (one.left, one.right) if len(one.left) > len(one.right) else (one.right, one.left)
    if len(left) == len(right) or not right or left[-1] != 1:
        return False
    return math.prod(left) == math.prod(right) > 1


class DoubleSoftmax(OnceRule[GraphScan | LossScan]):
    """A softmax is fed to a softmax: cross entropy has its own, and gradients shrink.

    Log-probabilities stay as they are when their log_softmax is taken again.
    """

    name = "double_softmax"
    hears = (GraphScan, LossScan)

    def judge(self, fact: GraphScan | LossScan) -> Finding | None:
        """Return the finding, with the line."""
        if isinstance(fact, LossScan):
            fed = [(c, (c.softmax_fed_by, c.fed_by)) for c in fact.calls]
            twice = [c for c, pair in fed if {*pair} <= {"softmax", "log_softmax"} and pair != ("log_softmax",) * 2]
            places = [c.where or c.op for c in twice]
        else:
            places = list(fact.double_softmaxes)
        if not places:
            return None
        return self.report(
            step=fact.step,
            message=f"a softmax is applied to a softmax at {show(places)}",
            advice="Give cross_entropy the logits: it applies log_softmax itself.",
            evidence={"where": places[:SHOWN]},
        )


class AnomalyMode(OnceRule[GraphScan]):
    """torch's anomaly mode is on (info): every backward is watched, 12 times slower on a small model on the CPU."""

    name = "anomaly_mode_left_on"
    hears = (GraphScan,)

    def judge(self, fact: GraphScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if not fact.anomaly_mode:
            return None
        return self.report(
            severity=Severity.INFO,
            step=fact.step,
            message="torch.autograd's anomaly mode is on, which slows every step down",
            advice="Remove set_detect_anomaly(True); a failing step is diagnosed without it.",
        )
