"""How well loss-spike rules find spikes, and how often they raise false alarms: ours and those that the peers ship.

Losses are synthetic: 2.7 + 8.3 exp(-t/300) plus noise of scale 0.03, 4000 steps, 30 seeds, one event after step 1500 in
each trace. For each kind of noise: the share of events found while they last, the mean delay in steps, and alarms
outside events per 1000 steps. The rules of OLMo-core, Lightning, llm-foundry and Megatron-LM are reimplemented from
their formulas, with their defaults; a simple median + 8 MAD is included for comparison.

    python benchmarks/detectors.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from machine import write_results
from steadygrad.config import DetectConfig
from steadygrad.detect import Detector
from steadygrad.detect.loss import LossSpike
from steadygrad.detect.nonfinite import NonfiniteLoss
from steadygrad.facts import Reading
from steadygrad.stats import Baseline

NUM_STEPS, FIRST_EVENT, SIGMA, RATE = 4000, 1500, 0.03, 1e-3


class SpikeRule(Protocol):
    """Decides whether a loss is an alarm; losses come in order, with the learning rate of their step."""

    def observe(self, loss: float, rate: float) -> bool:
        """Return whether this loss is an alarm."""
        ...


# --- the rules -------------------------------------------------------------------------------------------------------


class Steadygrad:
    """`nonfinite_loss` and `loss_spike`, called as a Guard calls them. A spike that continues is one alarm."""

    def __init__(self) -> None:
        self._detector = Detector([NonfiniteLoss(), LossSpike(DetectConfig())])
        self._step = 0

    def observe(self, loss: float, rate: float) -> bool:
        reading = Reading(
            step=self._step,
            loss=loss,
            grad_norm=1.0,
            finite_grad_norm=1.0,
            num_nonfinite=0,
            num_nan=0,
            clip_coefficient=1.0,
            skipped=False,
            learning_rates=(rate,),
        )
        self._step += 1
        return bool(self._detector.observe(reading))


class OlmoCore:
    """Above mean + 6 standard deviations of the last 128, once it has 64; every loss enters the window."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=128)

    def observe(self, loss: float, rate: float) -> bool:
        alarm = False
        if len(self._window) >= 64:
            mean = sum(self._window) / len(self._window)
            variance = sum((v - mean) ** 2 for v in self._window) / (len(self._window) - 1)
            alarm = not loss - mean <= 6.0 * math.sqrt(variance)  # NaN compares false, so NaN is an alarm
        self._window.append(loss)
        return alarm


class Lightning:
    """Three times the running mean of 10 and worse than the last one, or not finite; alarms do not enter the mean."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=10)
        self._last = math.inf

    def observe(self, loss: float, rate: float) -> bool:
        alarm = False
        if self._window:
            mean = sum(self._window) / len(self._window)
            alarm = not math.isfinite(loss) or (loss > self._last and abs(loss - mean) >= abs(2.0 * mean))
        if not alarm:
            self._window.append(loss)
            self._last = loss
        return alarm


class LlmFoundry:
    """Twice the mean of the window (100, or 5 % of the run) for more than 4 steps in a row."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=max(100, NUM_STEPS // 20))
        self._num_high = 0

    def observe(self, loss: float, rate: float) -> bool:
        if len(self._window) == self._window.maxlen:
            mean = sum(self._window) / len(self._window)
            self._num_high = self._num_high + 1 if loss >= 2.0 * mean else 0
        self._window.append(loss)
        return self._num_high > 4


class MegatronLm:
    """Ten times the largest of the first 100, or NaN or Inf."""

    def __init__(self) -> None:
        self._largest, self._num_seen = 0.0, 0

    def observe(self, loss: float, rate: float) -> bool:
        if not math.isfinite(loss):
            return True
        if self._num_seen < 100:
            self._num_seen += 1
            self._largest = max(self._largest, abs(loss))
            return False
        return loss >= 10.0 * self._largest


class MedianMad:
    """Above median + 8 MAD of the last 128, outliers left out, or not finite."""

    def __init__(self) -> None:
        self._baseline = Baseline(window=128)

    def observe(self, loss: float, rate: float) -> bool:
        score = self._baseline.score(loss)
        self._baseline.admit(loss)
        return score > 8.0


RULES: dict[str, Callable[[], SpikeRule]] = {
    "steadygrad": Steadygrad,
    "median + 8 MAD": MedianMad,
    "OLMo-core": OlmoCore,
    "Lightning": Lightning,
    "llm-foundry": LlmFoundry,
    "Megatron-LM": MegatronLm,
}


# --- the losses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """Losses of a healthy run, and the learning rates that a rule may use."""

    losses: list[float]
    rates: list[float]


def student_t(r: random.Random, degrees: int = 3) -> float:
    """Heavy tails on both sides."""
    return r.gauss(0, 1) / math.sqrt(r.gammavariate(degrees / 2, 2.0) / degrees)


def make_trace(noise: str, seed: int) -> Trace:
    """Make one healthy run."""
    r = random.Random(f"{noise}/{seed}")
    draw: Callable[[], float] = {
        "student t": lambda: student_t(r),
        "lognormal": lambda: math.exp(r.gauss(0, 1)) - 1.0,
    }.get(noise, lambda: r.gauss(0, 1))
    losses, rates, walk = [], [], 0.0
    for t in range(NUM_STEPS):
        loss, rate = 2.7 + 8.3 * math.exp(-t / 300), RATE
        if noise == "drift":
            walk += 0.05 * SIGMA * r.gauss(0, 1)
            loss += walk + 0.1 * math.sin(t / 150)
        elif noise == "learning-rate drops":
            passed = sum(t >= at for at in (1000, 2000, 3000))
            loss, rate = loss + 0.4 * (3 - passed), RATE * 0.1**passed
        elif noise == "learning-rate restarts":
            phase = t % 1000
            loss += 0.5 * math.exp(-phase / 100) * min(1.0, phase / 5) * (t >= 1000)
            rate = RATE * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * phase / 1000)))
        losses.append(loss + SIGMA * draw())
        rates.append(rate)
    return Trace(losses, rates)


NOISES = ["gaussian", "student t", "lognormal", "drift", "learning-rate drops", "learning-rate restarts"]


@dataclass(frozen=True)
class Event:
    """What is added to the losses, by steps since the event began, and the part that counts as found."""

    added: Mapping[int, float]
    first: int = 0

    @property
    def last(self) -> int:
        return max(self.added)


EVENTS = {
    "+0.3": Event({0: 0.3}),
    "+1": Event({0: 1.0}),
    "+3": Event({0: 3.0}),
    "+1, 5 steps": Event(dict.fromkeys(range(5), 1.0)),
    "+6, 6 steps": Event(dict.fromkeys(range(6), 6.0)),
    "NaN": Event({0: math.nan}),
    "+1 after +3": Event({0: 3.0, 20: 1.0}, first=20),
}


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass
class Score:
    """What one rule did under one kind of noise."""

    found: dict[str, list[bool]] = field(default_factory=lambda: {name: [] for name in EVENTS})
    delays: list[int] = field(default_factory=list)
    num_false: int = 0
    num_steps: int = 0

    def summarise(self) -> dict[str, Any]:
        return {
            "found": {name: sum(found) / len(found) for name, found in self.found.items()},
            "mean_delay_steps": statistics.fmean(self.delays) if self.delays else None,
            "false_alarms_per_1000": 1000.0 * self.num_false / self.num_steps,
        }


def run_rule(
    rule: SpikeRule, trace: Trace, start: int, added: Mapping[int, float], stop: int, offset: int
) -> list[int]:
    """Return the steps from `start` on at which the rule raised an alarm."""
    losses, rates = trace.losses, trace.rates
    return [t for t in range(start, stop) if rule.observe(losses[t] + added.get(t - offset, 0.0), rates[t])]


def compare(noise: str, num_seeds: int) -> dict[str, Any]:
    """Run every rule on every event under one kind of noise; the steps before the event are run once for all events."""
    scores = {name: Score() for name in RULES}
    for seed in range(num_seeds):
        trace = make_trace(noise, seed)
        at = random.Random(f"when/{seed}").randrange(FIRST_EVENT, NUM_STEPS - 500)
        for name, make in RULES.items():
            score, rule = scores[name], make()
            before = run_rule(rule, trace, 0, {}, at, 0)
            score.num_false += len(before)
            score.num_steps += at
            for kind, event in EVENTS.items():
                alarms = run_rule(copy.deepcopy(rule), trace, at, event.added, NUM_STEPS, at)
                count(score, kind, event, [t - at for t in alarms])
                score.num_steps += NUM_STEPS - at
    return {name: score.summarise() for name, score in scores.items()}


def count(score: Score, kind: str, event: Event, alarms: Sequence[int]) -> None:
    """Count alarms, given as steps since the event began: one on a changed loss is correct, any other is false."""
    hits = [t for t in alarms if event.first <= t <= event.last and t in event.added]
    score.found[kind].append(bool(hits))
    if hits:
        score.delays.append(hits[0] - event.first)
    score.num_false += sum(t not in event.added for t in alarms)


def render(results: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = []
    for noise, rules in results.items():
        lines += [f"\n**{noise}**", "", "| rule | " + " | ".join(EVENTS) + " | delay | false alarms / 1000 |"]
        lines.append("|---" * (len(EVENTS) + 3) + "|")
        for name, one in rules.items():
            found = " | ".join(f"{share:.2f}" for share in one["found"].values())
            delay = one["mean_delay_steps"]
            shown = "-" if delay is None else f"{delay:.1f}"
            lines.append(f"| {name} | {found} | {shown} | {one['false_alarms_per_1000']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 seeds instead of 30, and nothing is written")
    arguments = parser.parse_args()
    num_seeds = 3 if arguments.quick else 30
    results = {noise: compare(noise, num_seeds) for noise in NOISES}
    print(render(results))
    found = {"num_seeds": num_seeds, "num_steps": NUM_STEPS, "noise": results}
    print("\nwritten:", write_results("detectors", found, quick=arguments.quick))


if __name__ == "__main__":
    main()
