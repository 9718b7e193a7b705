"""How long a report of a long run takes, how large it is, and how soon the live page shows something.

The run is made up: a million steps of a falling, noisy loss with a few spikes, NaNs and skips, the norms of 150
parameters every hundredth step, and 2,000 incidents. The targets are 5 s on two free cores, 1 MB, 2 s for the page's
first paint and a frame of 17 ms while zooming, which are taken with Chromium where there is one. Then the live page
lists 100 runs of 100,000 steps, of which ten are being written: how long the list takes, and what memory the server
needs. CPU seconds are those of all processes: on a busy machine they say more than the clock.

    python benchmarks/report.py [--steps 1000000] [--folder DIR] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from machine import describe_machine, write_results

NUM_PARAMETERS = 150
SPIKES = 40


def write_long_run(path: Path, num_steps: int) -> None:
    """A run directory as the recorder writes one, only faster."""
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
        for i in range(2000):
            incidents.write(json.dumps(make_incident(i * num_steps // 2000)) + "\n")
    (path / "train.log").touch()


def make_step(step: int, num_steps: int, noise: random.Random, *, spike: bool) -> str:
    """One line of steps.jsonl."""
    loss = 2 + 8 * math.exp(-8 * step / num_steps) + noise.gauss(0, 0.1) + 5 * spike
    norm = 10 ** noise.gauss(-0.1, 0.2) * (50 if spike else 1)
    bad = step % 9973 == 17
    coefficient = 1.0 if bad else min(1.0, 1 / norm)
    rate = 3e-4 * (1 - step / num_steps)
    return (
        f'{{"step":{step},"loss":{chr(34) + "nan" + chr(34) if bad else repr(loss)},"grad_norm":{norm!r},'
        f'"clip_coefficient":{coefficient!r},"clipped":{"true" if coefficient < 1 else "false"},'
        f'"skipped":{"true" if bad else "false"},"num_nonfinite":0,"learning_rates":[{rate!r}],'
        f'"loss_scale":null,"num_microbatches":1,"num_dropped_microbatches":0,"time_seconds":{step * 0.05!r}}}\n'
    )


def make_incident(step: int) -> dict[str, Any]:
    """One line of incidents.jsonl."""
    finding = {"kind": "nonfinite_loss", "severity": "error", "step": step, "message": "the loss is nan"}
    return {
        "step": step,
        "finding": {**finding, "advice": "Look for log(0).", "evidence": {"loss": "nan"}},
        "verdict": {"action": "skip", "reason": "it must not reach a weight", "factor": None},
        "outcome": {"action": "skip", "message": "the step was skipped", "before": {}, "after": {}},
        "cause": None,
    }


def time_report(run: Path, target: Path) -> dict[str, float]:
    """Seconds and megabytes of `steadygrad report`, all of it in this process."""
    from steadygrad.view.render.report import write_report

    start, cpu = time.perf_counter(), sum(os.times()[:4])
    write_report([run], target)
    return {
        "report_seconds": time.perf_counter() - start,
        "report_cpu_seconds": sum(os.times()[:4]) - cpu,
        "report_megabytes": target.stat().st_size / 1e6,
    }


def time_first_paint(runs: Path, name: str) -> dict[str, float]:
    """Seconds until the live page has painted, and until its loss chart has points; nothing without a browser."""
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
        page.wait_for_selector("[data-chart='loss'] .plot > svg", timeout=60_000)
        first_points = time.perf_counter() - start
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
        page.wait_for_selector("body[data-progress='1']", timeout=120_000)
        whole = time.perf_counter() - start
        browser.close()
    return {"first_paint_seconds": paint, "first_points_seconds": first_points, "whole_run_seconds": whole}


ZOOM = """() => new Promise((done) => {
    const plot = document.querySelector("[data-chart='loss'] .plot");
    const { range } = plot.state.spec;
    const n = 1_000_000, x = new Float64Array(n), y = new Float64Array(n);
    for (let i = 0; i < n; i++) { x[i] = range[1] * i / n; y[i] = 2 + Math.sin(i / 5e4) + ((i * 7919) % 1000) / 5000; }
    const line = { ...plot.state.spec.lines[0], series: Series.make(x, y) };
    const times = [];
    const frame = (i) => {
        if (i === 60) { done(times.sort((a, b) => a - b)[30]); return; }
        const start = performance.now(), by = (range[1] * i) / 150;
        Chart.draw(plot, { ...plot.state.spec, lines: [line], range: [range[0] + by, range[1] - by] });
        plot.getBoundingClientRect();
        times.push(performance.now() - start);
        requestAnimationFrame(() => frame(i + 1));
    };
    frame(0);
})"""
"""Draws a curve of a million points 60 times, each time a little closer; returns the median in milliseconds."""


def time_zoom(report: Path) -> dict[str, float]:
    """Milliseconds to draw a million points once more while zooming; nothing without a browser."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(report.as_uri())
        page.wait_for_selector("[data-chart='loss'] .plot > svg", timeout=60_000)
        median = page.evaluate(ZOOM)
        browser.close()
    return {"zoom_frame_milliseconds": median}


def time_many_runs(folder: Path, num_runs: int, num_steps: int) -> dict[str, float]:
    """Seconds until the live list of many runs is there, its median while ten of them grow, and the server's memory."""
    first = folder / "many" / "run-000"
    if not first.exists():
        write_long_run(first, num_steps)
    for i in range(1, num_runs):
        run = folder / "many" / f"run-{i:03d}"
        if not run.exists():
            run.mkdir()
            for path in first.iterdir():
                (run / path.name).symlink_to(path) if i >= 10 else shutil.copy(path, run / path.name)
    command = [sys.executable, "-m", "steadygrad", "view", str(folder / "many"), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[1]
    try:
        times = []
        noise = random.Random(1)
        for i in range(20):
            for n in range(10):
                with (folder / "many" / f"run-{n:03d}" / "steps.jsonl").open("a") as steps:
                    steps.write(make_step(num_steps + i, num_steps * 2, noise, spike=False))
            start = time.perf_counter()
            with urllib.request.urlopen(address) as answer:
                assert answer.read().count(b"<tr>") == num_runs + 1
            times.append(time.perf_counter() - start)
        with urllib.request.urlopen(f"{address}/compare?" + "&".join(f"run=run-{n:03d}" for n in range(10))) as answer:
            answer.read()
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.terminate()
        server.wait()
    megabytes = int(status.split("VmHWM:")[1].split()[0]) / 1000
    return {"list_seconds": times[0], "list_median_seconds": statistics.median(times), "server_megabytes": megabytes}


def main() -> None:
    """Write the run, measure, print, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the made-up run is kept; made when it is not there")
    parser.add_argument("--quick", action="store_true", help="20,000 steps and no browser; nothing is written")
    arguments = parser.parse_args()
    arguments.steps = 20_000 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        run = folder / f"long-{arguments.steps}"
        if not run.exists():
            write_long_run(run, arguments.steps)
        report = Path(scratch) / "report.html"
        results = time_report(run, report)
        if not arguments.quick:
            results |= time_zoom(report)
            results |= time_first_paint(folder, run.name)
            results |= time_many_runs(folder, 100, 100_000)
    results |= {"num_steps": arguments.steps, "load_average": os.getloadavg()[0]}
    for name, value in results.items():
        print(f"{name:<22} {value:.4g}")
    print(describe_machine())
    print("written:", write_results("report", results, quick=arguments.quick))


if __name__ == "__main__":
    main()
