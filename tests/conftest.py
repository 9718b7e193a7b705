"""Settings that must stand before torch and triton are imported, and fixtures that every test shares."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

# Some virtual CPUs advertise AMX and fault on it (SIGILL in half-precision matmuls); see the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Tiny tensors: a second thread only waits, here and in every process that a test starts, and tests run beside others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before whoever imports its library first

import pytest
import torch

from preloading import RANKS, preload
from slow import find_slow, find_unused

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, statement by statement
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU wherever it is imported

torch.set_num_threads(1)


LONGEST = (
    "healthy/test_healthy.py",
    "distributed/test_tune_workers.py",
    "distributed/test_elastic.py",
    "recipes/test_ranks.py",
    "stories/",
    "recipes/",
    "distributed/",
    "adapters/",
)
"""Files that take longest. They come first: a worker that began one at the end would be waited for."""
WHOLE_SUITE = 10_000
"""More tests than this: all were collected, none chosen."""
SHOWN_ABOVE_SECONDS = 60.0
NUM_SHOWN = 40


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next((i for i, one in enumerate(LONGEST) if f"tests/{one}" in item.nodeid), len(LONGEST))
    )
    places = {item.nodeid.removeprefix("tests/"): item for item in items}
    for place in find_slow(list(places)):
        places[place].add_marker(pytest.mark.slow)
    unused = find_unused(list(places)) if len(items) > WHOLE_SUITE else []
    if unused:
        raise pytest.UsageError(f"tests/slow.py has patterns that no test fits: {', '.join(unused)}. Correct them.")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not walk through a million objects of libraries each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files that took longest, so that a slow one is seen when it comes in."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if sum(seconds.values()) > SHOWN_ABOVE_SECONDS:
        terminalreporter.write_sep("=", "files that took longest, in seconds")
        for name, taken in seconds.most_common(NUM_SHOWN):
            terminalreporter.write_line(f"{taken:7.1f}  {name}")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries count at the end what the collector has left


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_looked_through() -> None:
    """The same for what the files before have imported: a Guard and `diagnose` look for some objects among all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ranks_start_quickly(request: pytest.FixtureRequest) -> None:
    """Ranks are forked from a server that has imported torch and what the file names in PRELOADED."""
    if hasattr(request.module, "run_ranks"):
        preload(*RANKS, *getattr(request.module, "PRELOADED", ()))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left() -> Iterator[None]:
    """A process in which something was compiled is looked at less closely; that must not reach the next test."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.eval_frame.cached_backends:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some versions of torch warn of what they import for it
            dynamo.reset()


@pytest.fixture(autouse=True)
def _no_guard_hears_signals_of_the_next_test() -> Iterator[None]:
    """A guard that a test did not close would save and end the process at the next test's signal."""
    yield
    shutdown = sys.modules.get("steadygrad.guard.shutdown")
    for member in [] if shutdown is None else shutdown._rounds.list_members():
        member.watch.stop()
        member.stop()


@pytest.fixture(autouse=True)
def _no_guard_gives_lines_of_the_next_test_a_name() -> Iterator[None]:
    """Beside a guard that a test did not close, a guard's lines would say whose they are."""
    yield
    speaker = sys.modules.get("steadygrad.judgement.speaker")
    if speaker is not None:
        speaker._live.clear()
