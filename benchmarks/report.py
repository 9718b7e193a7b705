"""How long a report of a long run takes, how large it is, and how soon the live page shows a new step.

The run is synthetic: a million steps of a falling, noisy loss with a few spikes, NaNs and skips, the norms of 150
parameters every hundredth step, and incidents. The targets are 5 s on two free cores, 1 MB, 2 s to the page's first
paint and 17 ms per frame while zooming; the last two need Chromium. Then the live page lists 100 runs of 100,000 steps,
ten of them being written, for twelve viewers: how long the list takes, how long after a step was written the page shows
it, and how much memory the server needs. CPU seconds are summed over all processes: on a busy machine they say more
than the clock.

    python benchmarks/report.py [--steps 1000000] [--folder DIR] [--quick] [--live]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine, write_results

NUM_PARAMETERS = 150
SPIKES = 40
FIRST_BAD, BAD_EVERY = 17, 9973
"""Steps whose loss is NaN."""
GROWING = 10
"""Runs that grow while the live page is measured."""
NUM_ROUNDS = 30
LAST_STEP = re.compile(rb'"chart:run0:last_step":(\d+)')


def write_long_run(path: Path, num_steps: int) -> None:
    """Write a run directory in the recorder's format, only faster."""
    path.mkdir(parents=True, exist_ok=True)
    names = [f"blocks.{i // 6}.{('attention', 'mlp')[i % 2]}.{i % 6}.weight" for i in range(NUM_PARAMETERS)]
    about = {"started": "2026-01-31T10:15:00+00:00", "config": {"clip": {"kind": "fixed_norm", "max_norm": 1.0}}}
    (path / "run.json").write_text(json.dumps({**about, "parameters": names, "versions": {}, "machine": {}}))
    noise = random.Random(0)
    spikes = set(noise.sample(range(num_steps), min(SPIKES, num_steps)))
    with (path / "steps.jsonl").open("w") as steps, (path / "layers.jsonl").open("w") as layers:
        for step in range(num_steps):
            steps.write(make_step(step, num_steps, noise, spike=step in spikes))
            if step % 100 == 0:
                rows = ",".join(f'"{name}":[{10 ** noise.gauss(-2, 0.3)!r},{noise.random()!r},0,0.0]' for name in names)
                layers.write(f'{{"step":{step},"gradients":{{{rows}}}}}\n')
    with (path / "incidents.jsonl").open("w") as incidents:
        for step in range(FIRST_BAD, num_steps, BAD_EVERY):
            incidents.write(json.dumps(make_incident(step)) + "\n")
    (path / "train.log").touch()


def make_step(step: int, num_steps: int, noise: random.Random, *, spike: bool) -> str:
    """Return one line of steps.jsonl."""
    loss = 2 + 8 * math.exp(-8 * step / num_steps) + noise.gauss(0, 0.1) + 5 * spike
    norm = 10 ** noise.gauss(-0.1, 0.2) * (50 if spike else 1)
    bad = step % BAD_EVERY == FIRST_BAD
    coefficient = 1.0 if bad else min(1.0, 1 / norm)
    rate = 3e-4 * (1 - step / num_steps)
    return (
        f'{{"step":{step},"loss":{chr(34) + "nan" + chr(34) if bad else repr(loss)},"grad_norm":{norm!r},'
        f'"clip_coefficient":{coefficient!r},"clipped":{"true" if coefficient < 1 else "false"},'
        f'"skipped":{"true" if bad else "false"},"num_nonfinite":0,"learning_rates":[{rate!r}],'
        f'"loss_scale":null,"num_microbatches":1,"num_dropped_microbatches":0,"time_seconds":{step * 0.05!r}}}\n'
    )


def make_incident(step: int) -> dict[str, Any]:
    """Return one line of incidents.jsonl."""
    finding = {"kind": "nonfinite_loss", "severity": "error", "step": step, "message": "the loss is NaN"}
    return {
        "step": step,
        "finding": {**finding, "advice": "Look for log(0).", "evidence": {"loss": "nan"}},
        "verdict": {"action": "skip", "reason": "it must not reach a weight", "factor": None},
        "outcome": {"action": "skip", "message": "the step was skipped", "before": {}, "after": {}},
        "cause": None,
    }


def time_report(run: Path, target: Path) -> dict[str, float]:
    """Return seconds and megabytes of `steadygrad report`, run in this process."""
    from steadygrad.view.render.report import write_report

    start, cpu = time.perf_counter(), sum(os.times()[:4])
    write_report([run], target)
    return {
        "report_seconds": time.perf_counter() - start,
        "report_cpu_seconds": sum(os.times()[:4]) - cpu,
        "report_megabytes": target.stat().st_size / 1e6,
    }


def time_first_paint(runs: Path, name: str) -> dict[str, float]:
    """Return the seconds until the live page has painted and until its loss chart has points; nothing without a
    browser.
    """
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser_path = None
    if browser_path is None:
        return {}
    from steadygrad.view.serve.listen import serve_in_thread

    with serve_in_thread(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        start = time.perf_counter()
        page.goto(f"{address}/runs/{name}", wait_until="commit")
        page.wait_for_selector("[data-chart='loss'] .plot > svg", timeout=300_000)
        first_points = time.perf_counter() - start
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
        page.wait_for_selector("body[data-progress='1']", timeout=600_000)
        whole = time.perf_counter() - start
        browser.close()
    return {"first_paint_seconds": paint, "first_points_seconds": first_points, "whole_run_seconds": whole}


ZOOM_FRAMES = 60
PREPARE = """() => {
    const { spec } = document.querySelector("[data-chart='loss'] .plot").state;
    const n = 1_000_000, x = new Float64Array(n), y = new Float64Array(n);
    for (let i = 0; i < n; i++) {
        x[i] = spec.range[1] * i / n; y[i] = 2 + Math.sin(i / 5e4) + ((i * 7919) % 1000) / 5000;
    }
    window.million = { ...spec.lines[0], series: Series.make(x, y) };
}"""
ZOOM = """(frames) => new Promise((done) => {
    const plot = document.querySelector("[data-chart='loss'] .plot");
    const { range } = plot.state.spec;
    const times = [];
    const frame = (i) => {
        if (i === frames) { done(times.sort((a, b) => a - b)[frames >> 1]); return; }
        const start = performance.now(), by = (range[1] * i) / (2.5 * frames);
        Chart.draw(plot, { ...plot.state.spec, lines: [window.million], range: [range[0] + by, range[1] - by] });
        plot.getBoundingClientRect();
        times.push(performance.now() - start);
        requestAnimationFrame(() => frame(i + 1));
    };
    frame(0);
})"""
"""Draws a curve of a million points repeatedly, each time closer; returns the median in milliseconds."""


def time_zoom(report: Path) -> dict[str, float]:
    """Return the milliseconds to redraw a million points while zooming; nothing without a browser.

    By the clock, and in CPU time of the page's main thread, including everything the browser does there for a frame.
    """
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(report.as_uri())
        page.wait_for_selector("[data-chart='loss'] .plot > svg", timeout=300_000)
        page.evaluate(PREPARE)
        watch = page.context.new_cdp_session(page)
        watch.send("Performance.enable", {"timeDomain": "threadTicks"})
        before = _read_busy_seconds(watch)
        median = page.evaluate(ZOOM, ZOOM_FRAMES)
        busy = _read_busy_seconds(watch) - before
        browser.close()
    return {"zoom_frame_milliseconds": median, "zoom_frame_cpu_milliseconds": 1000 * busy / ZOOM_FRAMES}


def _read_busy_seconds(watch: Any) -> float:
    """Return the CPU seconds that the page's main thread has used."""
    metrics = {one["name"]: one["value"] for one in watch.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def make_many_runs(folder: Path, num_runs: int, num_steps: int) -> Path:
    """Write the runs: the growing ones have their own files, the others link to the first."""
    many = folder / f"many-{num_runs}-{num_steps}"
    first = many / "run-000"
    if not first.exists():
        write_long_run(first, num_steps)
    for i in range(1, num_runs):
        run = many / f"run-{i:03d}"
        if not run.exists():
            run.mkdir()
            for path in first.iterdir():
                shutil.copy(path, run / path.name) if i < GROWING else (run / path.name).symlink_to(path)
    return many


class Viewer(threading.Thread):
    """A viewer with an open page: reads its stream of events, and notes when each step of a run arrived."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._answer = urllib.request.urlopen(address)
        self.arrived: dict[int, float] = {}
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # the server has ended
            for line in self._answer:
                if (found := LAST_STEP.search(line)) is not None:
                    self.arrived.setdefault(int(found[1]), time.perf_counter())


def time_many_runs(folder: Path, num_runs: int, num_steps: int) -> dict[str, float]:
    """Measure latency and memory of the live page while ten of many runs grow and twelve viewers watch."""
    many = make_many_runs(folder, num_runs, num_steps)
    command = [sys.executable, "-m", "steadygrad", "view", str(many), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[1]
    try:
        results = {"list_first_seconds": _time_list(address, num_runs)}
        viewers = [Viewer(f"{address}/events/run-{n:03d}") for n in range(4)]
        viewers += [Viewer(f"{address}/events") for _ in range(8)]
        next_step = _read_last_step(many / "run-000") + 1  # a reused folder has grown
        _wait_for(lambda: all(next_step - 1 in viewer.arrived for viewer in viewers[:4]), seconds=600)
        lists, updates = [], []
        noise = random.Random(1)
        for step in range(next_step, next_step + NUM_ROUNDS):
            line = make_step(step, num_steps * 2, noise, spike=False)
            for n in range(GROWING):
                with (many / f"run-{n:03d}" / "steps.jsonl").open("a") as steps:
                    steps.write(line)
            written = time.perf_counter()
            lists.append(_time_list(address, num_runs))
            _wait_for(lambda step=step: step in viewers[0].arrived)
            updates.append(viewers[0].arrived[step] - written)
        start = time.perf_counter()
        with urllib.request.urlopen(f"{address}/compare?" + "&".join(f"run=run-{n:03d}" for n in range(10))) as answer:
            answer.read()
        results["compare_ten_seconds"] = time.perf_counter() - start
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.terminate()
        server.wait()
    return results | {
        "list_median_seconds": statistics.median(lists),
        "list_worst_seconds": max(lists),
        "update_median_seconds": statistics.median(updates),
        "update_worst_seconds": max(updates),
        "server_megabytes": int(status.split("VmHWM:")[1].split()[0]) / 1000,
    }


def _read_last_step(run: Path) -> int:
    with (run / "steps.jsonl").open("rb") as steps:
        steps.seek(-2000, os.SEEK_END)
        return int(json.loads(steps.readlines()[-1])["step"])


def _time_list(address: str, num_runs: int) -> float:
    start = time.perf_counter()
    with urllib.request.urlopen(address) as answer:
        assert answer.read().count(b"<tr>") == num_runs + 1
    return time.perf_counter() - start


def _wait_for(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.perf_counter() + seconds
    while not holds():
        assert time.perf_counter() < deadline, "the live page did not show a step within two minutes"
        time.sleep(0.01)


def main() -> None:
    """Write the runs, measure, print, and save the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="folder of the synthetic runs; they are created if missing")
    parser.add_argument("--quick", action="store_true", help="20,000 steps and no browser; nothing is written")
    parser.add_argument("--live", action="store_true", help="only zooming and the live page with many runs")
    arguments = parser.parse_args()
    num_steps = 20_000 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as scratch:
        folder, report = arguments.folder or Path(scratch), Path(scratch) / "report.html"
        if not arguments.live:
            run = folder / f"long-{num_steps}"
            if not run.exists():
                write_long_run(run, num_steps)
            results = time_report(run, report) | ({} if arguments.quick else time_first_paint(folder, run.name))
            keep("report", results | {"num_steps": num_steps}, quick=arguments.quick)
        if not arguments.quick:
            num_runs, num_steps = 100, 100_000
            time_report(make_many_runs(folder, num_runs, num_steps) / "run-000", report)
            results = time_zoom(report) | time_many_runs(folder, num_runs, num_steps)
            keep("report_live", results | {"num_runs": num_runs, "num_steps": num_steps}, quick=False)
    print(describe_machine())


def keep(name: str, results: dict[str, float], *, quick: bool) -> None:
    """Print the numbers and write them, with the load of the machine."""
    results |= {"load_average": os.getloadavg()[0]}
    for key, value in results.items():
        print(f"{key:<27} {value:.4g}")
    print("written:", write_results(name, results, quick=quick))


if __name__ == "__main__":
    main()
