"""Settings needed before torch and triton are imported, and fixtures for every test."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

# Some virtual CPUs advertise AMX and fault on it (SIGILL in half-precision matmuls); see the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Tensors are tiny: a second thread would only wait, here and in every subprocess; tests also run in parallel.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before any library that reads it is imported

import pytest
import torch

from preloading import RANKS, preload
from slow import find_slow, find_unused

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, statement by statement
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns on every import that it found no GPU

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
"""The slowest files, which start first: a worker that began one last would keep the others waiting."""
WHOLE_SUITE = 10_000
"""With more tests than this, all were collected and none was selected."""
SHOWN_ABOVE_SECONDS = 60.0
NUM_SHOWN = 40


@pytest.hookimpl(tryfirst=True)  # before pytest applies `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next((i for i, one in enumerate(LONGEST) if f"tests/{one}" in item.nodeid), len(LONGEST))
    )
    places = {item.nodeid.removeprefix("tests/"): item for item in items}
    for place in find_slow(list(places)):
        places[place].add_marker(pytest.mark.slow)
    unused = find_unused(list(places)) if len(items) > WHOLE_SUITE else []
    if unused:
        raise pytest.UsageError(f"tests/slow.py has patterns that match no test: {', '.join(unused)}. Correct them.")


def pytest_collection_finish() -> None:
    """Freeze what was imported: the garbage collector need not walk a million library objects each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest files, so that a new slow one is noticed."""
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
    gc.unfreeze()  # some libraries count what the collector has left at exit


@pytest.fixture(scope="module", autouse=True)
def _imports_are_frozen() -> None:
    """Freeze imports of earlier files too: a Guard and `diagnose` search all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ranks_start_quickly(request: pytest.FixtureRequest) -> None:
    """Fork ranks from a server that has imported torch and the file's PRELOADED modules."""
    if hasattr(request.module, "run_ranks"):
        preload(*RANKS, *getattr(request.module, "PRELOADED", ()))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compile_caches_are_cleared() -> Iterator[None]:
    """Clear compiled code: a process that has compiled something gets fewer checks, which would affect later tests."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.eval_frame.cached_backends:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some versions of torch warn about their own imports here
            dynamo.reset()


@pytest.fixture(autouse=True)
def _guards_release_signals() -> Iterator[None]:
    """Release signals: a guard that a test did not close would save and exit at the next test's signal."""
    yield
    shutdown = sys.modules.get("steadygrad.guard.shutdown")
    for member in [] if shutdown is None else shutdown._rounds.list_members():
        member.watch.stop()
        member.stop()


@pytest.fixture(autouse=True)
def _guards_release_log_names() -> Iterator[None]:
    """Forget open guards: if a test left one open, the next guard's log lines would name their guard."""
    yield
    speaker = sys.modules.get("steadygrad.judgement.speaker")
    if speaker is not None:
        speaker._live.clear()


@pytest.fixture(autouse=True)
def _searches_are_free_again() -> None:
    """Give each test a process's whole time for searches of live objects: earlier tests make hundreds of guards."""
    searched = sys.modules.get("steadygrad.state.live_objects")
    if searched is not None:
        searched._seconds = 0.0  # type: ignore[attr-defined]
