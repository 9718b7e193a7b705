"""Turns results files into the table of README.md and the claims of docs/benchmarks.md.

Reads benchmarks/results/*.json and rounds; beyond that it only counts and takes ratios. If a file is missing, its rows
are left out. Imports only the standard library, so that a test can load it alone. `publish.py` puts the text where it
belongs; sections.py makes the long tables of docs/benchmarks.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
STOCK, QUIET = "clip_grad_norm_ + step", "Guard, norm below the threshold"
PLAIN, GUARDED = "plain (no clip, no check)", "Guard, guard.step(fn, batch)"
TRAINED = {
    "cuda": "GPT-2 124M, 1024 tokens, bf16 autocast, eager, fused AdamW, CUDA, B sequences per batch",
    "cpu": "a GPT of 10M parameters, 128 tokens, fp32, fused AdamW, CPU, B sequences per batch",
}
"""What whole_step.py trains on each device."""
Results = Mapping[str, Any]
Row = tuple[str, str, str]
"""What was measured, our number, and what to compare it with."""


def render_headline(results: Path = RESULTS) -> str:
    """Return the README's table: at most six claims, with means for costs."""
    rows = []
    for names in HEADLINE:
        files = [(name, found) for name in names if (found := read(results, name)) is not None]
        rows += [list(row) for name, found in files[:1] for row in SUMMARIES[name](found["results"])[:1]]
    return f"{render_table(['', 'steadygrad', 'for comparison'], rows, left=(0, 1, 2))}\n" if rows else ""


def render_numbers(results: Path = RESULTS) -> str:
    """Return all claims, one row each, then what a step costs on a GPU."""
    sections = [render_summary(results)]
    for name, render in (("whole_step", render_whole_step), ("guarded_step", render_guarded_step)):
        found = read(results, f"{name}_cuda")
        if found:
            source = describe(found["machine"], find_command(f"{name}_cuda", found["results"]))
            sections.append(f"{render(found['results'], 'cuda')}\n\n{source}\n")
    return "\n".join(section for section in sections if section)


def read(results: Path, name: str) -> dict[str, Any] | None:
    """Return one results file, or None if it is missing."""
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# --- one row for each claim ------------------------------------------------------------------------------------------


def render_summary(results: Path) -> str:
    """Return what was measured, our number, what to compare it with, the machine and the command."""
    rows, notes = [], []
    for name, summarise in SUMMARIES.items():
        found = read(results, name)
        if found is None:
            continue
        place = describe_place(found["machine"])
        if place not in notes:
            notes.append(place)
        command = find_command(name, found["results"]).removeprefix("python benchmarks/")
        rows += [[*row, chr(ord("A") + notes.index(place)), f"`{command}`"] for row in summarise(found["results"])]
    if not rows:
        return ""
    table = render_table(
        ["", "steadygrad", "for comparison", "on", "`python benchmarks/...`"], rows, left=(0, 1, 2, 3, 4)
    )
    places = "; ".join(f"{chr(ord('A') + i)}: {place}" for i, place in enumerate(notes))
    return f"{table}\n\n{places}.\n"


def summarise_whole_step(results: Results) -> list[Row]:
    batch, found = list(results.items())[-1]
    times, base = found["milliseconds"], found["base"]
    if GUARDED not in times or "clip_grad_norm_" not in times:
        return []
    ratios = {way: times[way] / times[base] for way in times}
    others = [f"{way.split('.')[-1].removeprefix('autograd ')} {ratios[way]:.2f}x" for way in WORTH if way in ratios]
    model = "GPT-2 124M, GPU" if base == PLAIN else "a GPT of 10M parameters, CPU"
    against = "the plain one" if base == PLAIN else "one with stock clipping"
    return [
        (
            f"A whole training step ({model}, {batch}), relative to {against}",
            f"{ratios[GUARDED]:.2f}x",
            ", ".join(others),
        )
    ]


def summarise_long_run(results: Results) -> list[Row]:
    """Summarise the means of whole runs, including every look, snapshot and record."""
    on_cpu = any(RUN in one["ways"] for one in results.values())
    what = "CPU, added to plain" if on_cpu else "GPU, relative to plain"
    names = ", ".join(_shorten([name.split(",")[0].split(" B=")[0] for name in results]))
    ours, stock = (_show_means(results, way, on_cpu=on_cpu) for way in (EVERYTHING, "clip_grad_norm_"))
    return [(f"Mean step of a whole run ({what}: {names})", ours, f"clip_grad_norm_ {stock}")]


def _shorten(names: Sequence[str]) -> list[str]:
    """Return names without a first word that is the previous one's.

    >>> _shorten(["124M eager", "124M compiled", "774M compiled"])
    ['124M eager', 'compiled', '774M compiled']
    """
    firsts = [name.split()[0] for name in names]
    pairs = zip(names, firsts, ["", *firsts])
    return [name.removeprefix(f"{first} ") if first == before else name for name, first, before in pairs]


def _show_means(results: Results, way: str, *, on_cpu: bool) -> str:
    means = [one["ways"].get(way) for one in results.values()]  # a way may be left out
    shown = ((f"{one['more_ms']:+.2f} ms" if on_cpu else f"{one['mean_ratio']:.2f}x") if one else "-" for one in means)
    return ", ".join(shown)


def render_long_run(results: Results) -> str:
    """Render mean, median and worst stretch of each way in each scenario."""
    parts = []
    for name, one in results.items():
        has_memory = all("host_peak_bytes" in found for found in one["ways"].values())
        rows = [
            [
                way,
                f"{found['mean_ms']:.2f} ({found['mean_ratio']:.3f})",
                f"{found['median_ms']:.2f}",
                f"{found['worst_ten_ms']:.2f} ({found['worst_ten_ratio']:.2f})",
                *([f"{found['host_peak_bytes'] / 2**20:.0f} MiB"] if has_memory else []),
            ]
            for way, found in one["ways"].items()
        ]
        header = ["", "mean", "median", "worst ten steps in a row", *(["peak host memory"] if has_memory else [])]
        rounds = max(found.get("rounds", 1) for found in one["ways"].values())
        steps = f"{one['steps']} steps in turns of {one['turn']}{f', {rounds} times' if rounds > 1 else ''}"
        parts.append(f"**{name}**, {steps}: milliseconds per step\n\n{render_table(header, rows)}")
        if "memory" in one:
            host, device = (one["memory"][f"{where}_peak_bytes"] / 2**30 for where in ("host", "device"))
            parts.append(
                f"Peak memory of all variants together: {host:.1f} GiB on the host, {device:.1f} GiB on the device."
            )
    return "\n\n".join(parts)


EVERYTHING, RUN = "Guard, defaults, with run_dir", "steadygrad run, script unchanged"
WORTH = ("clip_grad_norm_", "per-parameter checks and norms", "torch.autograd detect_anomaly")
"""The ways that a guarded step is compared with."""


def summarise_guarded_step(results: Results) -> list[Row]:
    ours, each = [], []
    for model in results.values():
        times = model["milliseconds"]
        ours.append(times[QUIET] / times[STOCK])
        each.append(times["isnan, isinf, norm of each parameter"] / times[STOCK])
    what = "From `backward()` to the end of `optimizer.step()`, relative to `clip_grad_norm_` + step"
    return [
        (f"{what} ({', '.join(results)})", show_range(ours, "x"), f"checking each parameter {show_range(each, 'x')}")
    ]


def summarise_zoo(results: Results) -> list[Row]:
    summary = results["summary"]
    what = "Broken trainings where op, line, module, kind and phase are all named correctly"
    exact = summary["anomaly_mode"]["exact"]
    controls = f"{len(summary['alarms'])} alarms on {summary['controls']} healthy ones"
    others_text = f"detect_anomaly {exact} (op and line only)"
    return [(what, f"{summary['diagnose']} of {summary['cases']}; {controls}", others_text)]


def summarise_peers(results: Results) -> list[Row]:
    peers, num = results["peers"], results["num_faults"]
    ours = peers["steadygrad Guard"]["counts"]
    others = {name: one["counts"] for name, one in peers.items() if name != "steadygrad Guard"}
    safe = [name for name, counts in others.items() if counts["goes_on"] == num]
    most = max(others, key=lambda name: others[name]["line"])
    survive = f"{len(safe)} of {len(others)} other ways" + (f" ({', '.join(safe)})" if safe else "")
    best = f"best of {len(others)} other ways: {others[most]['line']} ({most})"
    return [
        (f"{num} faults: no weight is damaged and training continues", f"{ours['goes_on']} of {num}", survive),
        ("... and the faulty line is named (the fourth fault is in the data)", f"{ours['line']} of {num - 1}", best),
    ]


def summarise_harm(results: Results) -> list[Row]:
    ours, eager = (results[way]["summary"] for way in ("on_proof", "at_once"))
    what = "Healthy but unusual trainings (RL, GANs, curricula) that a guard without clipping changed"
    return [(what, f"{ours['num_harmed']} of {ours['num_runs']}", f"acting at the first symptom {eager['num_harmed']}")]


def summarise_rescue(results: Results) -> list[Row]:
    num = sum(len(story["Guard"]) for story in results.values())
    saved = {way: sum(is_saved(run) for s in results.values() for run in s[way]) for way in RESCUERS}
    others_text = ", ".join(f"{way} {count}" for way, count in saved.items() if way != "Guard")
    what = f"Trainings with a fault that end within 10 % of the clean run's loss ({len(results)} faults, {num} runs)"
    return [(what, f"{saved['Guard']}", others_text)]


RESCUERS = ("Guard", "unguarded", "clip_grad_norm_", "ZClip")


def is_saved(run: Results) -> bool:
    """Whether a run of the rescue benchmark ended near the clean one."""
    return not run["died"] and not run["halted"] and run["relative_loss"] is not None and run["relative_loss"] <= 1.1


def summarise_lr_sensitivity(results: Results) -> list[Row]:
    columns = results["columns"]
    shown = {name: f"{one['num_trained']} of {one['num_runs']}" for name, one in columns.items()}
    others = ", ".join(f"{name} {shown[name]}" for name in ("no clip", "clip at 1.0", "ZClip", "AdaGC", "qk-norm"))
    ours = f"{shown['Guard']}; with qk-norm and z-loss {shown['Guard, qk-norm, z-loss']}"
    seeds = f"{results['num_seeds']} seed{'' if results['num_seeds'] == 1 else 's'}"
    return [(f"Learning rates from 3e-4 to 3e-1 that train a small GPT ({seeds})", ours, others)]


def summarise_detectors(results: Results) -> list[Row]:
    found, false = {}, {}
    for rules in results["noise"].values():
        for name, one in rules.items():
            found.setdefault(name, []).extend(one["found"].values())
            false.setdefault(name, []).append(one["false_alarms_per_1000"])
    shown = {
        name: f"{sum(found[name]) / len(found[name]):.0%}, {sum(false[name]) / len(false[name]):.2f}" for name in found
    }
    others_text = "; ".join(f"{name} {shown[name]}" for name in shown if name not in ("steadygrad", "median + 8 MAD"))
    return [("Loss spikes found, and false alarms per 1000 steps", shown["steadygrad"], others_text)]


def summarise_diagnosis(results: Results) -> list[Row]:
    cases = [results["one sample overflows"], results["no sample is to blame"]]
    memory = f"{max(case['memory'] for case in cases):.2f} of a step's memory"
    others_text = f"a step of {results['step_ms']:.0f} ms"
    return [
        (
            "One diagnosis, made only when a step fails",
            f"{show_range([c['steps'] for c in cases])} steps, {memory}",
            others_text,
        )
    ]


def summarise_crash(results: Results) -> list[Row]:
    lost = results["num_restarts_before_a_confirmed_save"]
    equal = "equal to the bit" if results["weights_equal"] else "NOT equal"
    during = f"{results['num_kills_while_writing']} of the kills during a save"
    what = f"`kill -9`, {results['num_kills']} times in one training: confirmed checkpoints lost; final weights"
    return [(what, f"{lost}; {equal}", during)]


def summarise_checkpoint(results: Results) -> list[Row]:
    size = f"{results['state_bytes'] / 1e9:.1f} GB, {'GPU' if results['device'] == 'cuda' else 'CPU'}"
    ours = (
        f"{results['stall_median_seconds']:.2f} s ({results['stall_share']:.0%}); "
        f"on disk after {results['durable_median_seconds']:.2f} s"
    )
    return [
        (
            f"How long training waits for a checkpoint ({size})",
            ours,
            f"torch.save {results['torch_save_median_seconds']:.2f} s",
        )
    ]


def summarise_scan(results: Results) -> list[Row]:
    name, found = next(iter(results.items()))
    peaks = {way: size / 2**20 for way, size in found["peak_bytes"].items()}
    theirs, ours = peaks
    times = found["warm"]["seconds"]
    return [
        (
            f"Checking every number of a checkpoint ({name})",
            f"{times[ours]:.2f} s, {peaks[ours]:.0f} MiB",
            f"{theirs} {times[theirs]:.2f} s, {peaks[theirs]:.0f} MiB",
        )
    ]


def summarise_multiway(results: Results) -> list[Row]:
    (last, alone), *_ = reversed(results["all"].items())
    shared = {size: row for size, row in results["all"].items() if any("ours" not in way for way in row)}
    rows = []
    for size, row in [*list(shared.items())[-1:], (last, alone)]:
        shown = {way: show_cost(found) for way, found in row.items()}
        others_text = "; ".join(f"{way} {cost}" for way, cost in shown.items() if "ours" not in way)
        num_bytes = 4 * int(size.removeprefix("B=")) ** 6
        ours = f"{shown['ours']}; bf16 {shown['ours, bf16']}"
        what = f"The exact contrastive loss over six modalities, {size}, D=512"
        rows.append((what, ours, others_text or f"the logits alone would be {num_bytes >> 30} GiB"))
    return rows


def summarise_report(results: Results) -> list[Row]:
    what = f"A report of {results['num_steps']:,} steps, as one file that opens offline"
    return [(what, f"{results['report_cpu_seconds']:.0f} s of CPU, {results['report_megabytes']:.1f} MB", "")]


def summarise_live(results: Results) -> list[Row]:
    zoom = f"{results['zoom_frame_cpu_milliseconds']:.0f} ms of CPU per frame"
    what = f"The live page with {results['num_runs']} runs of {results['num_steps']:,} steps, ten growing, 12 viewers"
    shown = f"a new step appears after {results['update_median_seconds']:.1f} s"
    memory = f"{results['server_megabytes']:.0f} MB of memory, load average {results['load_average']:.0f}"
    return [
        ("Zooming into a chart of a million points", zoom, "60 frames per second leave 17 ms"),
        (what, f"{shown}; {memory}", ""),
    ]


def summarise_distributed(results: Results) -> list[Row]:
    ratios = ", ".join(f"{kind.upper()} {one['ratio']['Guard']:.2f}x" for kind, one in results.items())
    return [("A guarded step on two ranks (gloo, CPU), relative to stock clipping", ratios, "")]


def summarise_silent(results: Results) -> list[Row]:
    """Summarise the errors named, the alarms on healthy programs, and TrainCheck's own errors."""
    cases, theirs = results["cases"].values(), results["traincheck"].values()
    faulty = [case for case in cases if case["kind"]]
    num_alarms = sum(bool(case["alarms"]) for case in cases)
    num_healthy = sum(case["alarms"] is not None for case in cases)
    ours = (
        f"{sum(case['named'] for case in faulty)} of {len(faulty)}; {num_alarms} alarms on {num_healthy} healthy ones"
    )
    both = (
        f"TrainCheck's {len(theirs)}, rebuilt: {sum(bool(one['kind']) for one in theirs)}; TrainCheck itself "
        f"{sum(one['traincheck'] for one in theirs)}"
    )
    return [("Errors that never crash (our own cases), named without a reference run", ours, both)]


SUMMARIES: dict[str, Callable[[Results], list[Row]]] = {
    "long_run_cuda": summarise_long_run,
    "long_run_cpu": summarise_long_run,
    "whole_step_cuda": summarise_whole_step,
    "guarded_step_cuda": summarise_guarded_step,
    "whole_step_cpu": summarise_whole_step,
    "harm": summarise_harm,
    "zoo": summarise_zoo,
    "silent": summarise_silent,
    "peers": summarise_peers,
    "rescue": summarise_rescue,
    "lr_sensitivity_cuda": summarise_lr_sensitivity,
    "detectors": summarise_detectors,
    "diagnosis_cuda": summarise_diagnosis,
    "crash": summarise_crash,
    "checkpoint_cuda": summarise_checkpoint,
    "checkpoint_cpu": summarise_checkpoint,
    "scan": summarise_scan,
    "multiway_cuda": summarise_multiway,
    "report": summarise_report,
    "report_live": summarise_live,
    "distributed_cpu": summarise_distributed,
}


HEADLINE = (("long_run_cuda", "long_run_cpu"), ("harm",), ("zoo",), ("silent",), ("rescue",), ("crash",))
"""The files that can show each claim of the README, the better one first."""


# --- what a step costs -----------------------------------------------------------------------------------------------


def render_guarded_step(results: Results, device: str) -> str:
    """Render everything between backward() and the end of optimizer.step()."""
    ways = list(next(iter(results.values()))["milliseconds"])
    rows = [[way, *(show_time(model["milliseconds"], way, STOCK) for model in results.values())] for way in ways]
    title = f"**From `backward()` to the end of `optimizer.step()`**, fp32 gradients, fused AdamW, {device.upper()}: "
    table = render_table(["", *results], rows)
    held = [model["memory"]["held_bytes"] for model in results.values() if model["memory"]]
    memory = f"\n\nA Guard holds at most {max(held) / 2**20:.2f} MiB of device memory." if held else ""
    return f"{title}milliseconds (ratio to `{STOCK}`)\n\n{table}{memory}"


def render_whole_step(results: Results, device: str) -> str:
    """Render forward, backward and optimizer."""
    first = next(iter(results.values()))
    rows = [
        [way, *(show_time(one["milliseconds"], way, one["base"]) for one in results.values())]
        for way in first["milliseconds"]
    ]
    title = f"**A whole training step**, {TRAINED[device]}: milliseconds (ratio to `{first['base']}`)"
    return f"{title}\n\n{render_table(['', *results], rows)}"


# --- words -----------------------------------------------------------------------------------------------------------


def show_time(milliseconds: Mapping[str, float], way: str, base: str) -> str:
    """Return '8.14 (0.56)'."""
    return f"{milliseconds[way]:.2f} ({milliseconds[way] / milliseconds[base]:.2f})"


def show_range(values: Sequence[float], unit: str = "") -> str:
    """Return '0.53x to 0.77x'."""
    low, high = (f"{value:.2f}{unit}" if value < 10 else f"{value:.1f}{unit}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def show_cost(found: Results) -> str:
    """Return '28.7 ms, 0.31 GiB', or 'out of memory'."""
    if found.get("out_of_memory"):
        return "out of memory"
    return f"{found['milliseconds']:.1f} ms, {found['peak_bytes'] / 2**30:.2f} GiB"


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return a Markdown table; the columns in `left` are aligned left, all others right."""
    rule = ["---" if i in left else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows])


def describe_place(machine: Mapping[str, Any]) -> str:
    """Return the machine and its versions."""
    place = machine.get("gpu") or f"{machine['cpu']}, {machine['num_cpus']} cores"
    return f"{place}, torch {machine['torch']}, Python {machine['python']}"


def describe(machine: Mapping[str, Any], command: str) -> str:
    """Return where the numbers come from and how to reproduce them."""
    return f"{describe_place(machine)}: `{command}`"


def find_command(name: str, results: Results) -> str:
    """Return the command that writes the results of that name."""
    program, _, device = name.rpartition("_")
    if device in ("cuda", "cpu") and program != "distributed":
        return f"python benchmarks/{program}.py --device {device}"
    if name == "scan":
        return f"python benchmarks/scan.py --gib {next(iter(results)).split()[0]}"
    special = {
        "distributed_cpu": "distributed.py",
        "peers": "peers/environment.py",
        "peers_harm": "peers/environment.py --harm",
        "peers_silent": "peers/environment.py --silent",
        "peers_traincheck": "peers/environment.py --traincheck",
        "forecast": "forecast/compare.py",
        "report_live": "report.py --live",
    }
    return f"python benchmarks/{special.get(name, f'{name}.py')}"
