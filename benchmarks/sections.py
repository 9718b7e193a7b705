"""Turns results files into docs/benchmarks.md: each benchmark gets a section with table, machine and command.

The text of a section is the docstring of its program; only the tables are made here. Like tables.py, this module only
rounds, counts and takes ratios.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer_tables import render_all_peers, render_beside_harm, render_more_of_peers, render_traincheck
from tables import (
    RESCUERS,
    RESULTS,
    Results,
    describe,
    find_command,
    is_saved,
    read,
    render_guarded_step,
    render_long_run,
    render_table,
    render_whole_step,
    show_cost,
)

HERE = Path(__file__).parent


def render_sections(results: Path = RESULTS) -> str:
    """Return every section that has results, in order."""
    parts = []
    for title, (program, files) in SECTIONS.items():
        found = [(name, read(results, name)) for name in files]
        tables = [
            f"{render(file['results'])}\n\n{describe(file['machine'], find_command(name, file['results']))}"
            for (name, file), render in zip(found, files.values())
            if file is not None
        ]
        if tables:
            parts.append("\n\n".join([f"## {title}", read_words(HERE / program), *tables]))
    return "\n\n".join(parts) + "\n"


def read_words(program: Path) -> str:
    """Return a program's docstring without the lines that show how to call it."""
    words = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    kept = []
    for line in words.splitlines():
        if line.startswith(("    python", "    PYTHONPATH", "Run `")):
            break
        kept.append(line.replace("[B]^", "\\[B\\]^"))
    return "\n".join(kept).strip()


def render_zoo(results: Results) -> str:
    summary = results["summary"]
    modes = summary["anomaly_mode"]
    cases = results["cases"].values()
    rows = [
        [f"`diagnose`: {part}", f"{sum(c['parts'][part] for c in cases)}"]
        for part in ("kind", "phase", "op", "module", "line")
    ]
    rows += [["`diagnose`: all five", f"{summary['diagnose']}"]]
    rows += [[f"`detect_anomaly`: {word}", f"{modes[word]}"] for word in modes]
    rows += [[f"alarms of `diagnose` on {summary['controls']} healthy controls", f"{len(summary['alarms'])}"]]
    return render_table(["", f"of {summary['cases']} cases"], rows)


def render_silent(results: Results) -> str:
    """Render TrainCheck's errors one by one, all cases by family, and the cost."""
    theirs = [
        [
            name,
            "yes" if one["traincheck"] else "no",
            f"`{one['kind']}`" if one["kind"] else "no",
            show_steps([one["steps"]]),
        ]
        for name, one in results["traincheck"].items()
    ]
    num = sum(bool(one["kind"]) for one in results["traincheck"].values())
    theirs.append(["**named**", f"**{sum(row[1] == 'yes' for row in theirs)}**", f"**{num}**", ""])
    cases = list(results["cases"].values())
    families = [
        [family, *show_family([case for case in cases if case["family"] == family])]
        for family in dict.fromkeys(case["family"] for case in cases)
    ]
    families.append(["**all**", *(f"**{cell}**" for cell in show_family(cases))])
    cost = results["cost"]
    return "\n\n".join(
        [
            render_table(["error", "TrainCheck", "named here", "noticed after (steps)"], theirs, left=(0, 1, 2)),
            render_table(["", "named", "noticed after (steps): median, most", "alarms on healthy runs"], families),
            f"Mean CPU time of a step of a small GPT over {cost['num_steps']} steps: {cost['mean_ms']['on']:.1f} ms, "
            f"{cost['ratio']:.3f} times that without checks; the median step: {cost['median_ratio']:.3f} times. The "
            f"first steps, which check graph, labels and calls, take {cost['first_steps_ms']:.0f} ms more in total.",
        ]
    )


def show_family(cases: list[Any]) -> list[str]:
    """Return how many were named, after how many steps, and false alarms."""
    faulty = [case for case in cases if case["kind"]]
    named = f"{sum(case['named'] for case in faulty)} of {len(faulty)}"
    steps = show_steps([case["steps"] for case in faulty])
    healthy = [case["alarms"] for case in cases if case["alarms"] is not None]
    return [named, steps, f"{sum(map(bool, healthy))} of {len(healthy)}"]


def show_steps(steps: list[int | None]) -> str:
    """Return '3, 141', the median and the maximum; a single value alone."""
    known = [step for step in steps if step is not None]
    if len(known) < 2:
        return "".join(map(str, known))
    return f"{statistics.median_low(known)}, {max(known)}"


def render_rescue(results: Results) -> str:
    ways = [*RESCUERS, "own policy", "Guard, clip at 1.0"]
    rows = [
        [f"{story}{'*' if cells['own_policy'] else ''}", *(show_runs(cells[way]) for way in ways)]
        for story, cells in results.items()
    ]
    num = sum(len(cells["Guard"]) for cells in results.values())
    counts = [str(sum(is_saved(run) for cells in results.values() for run in cells[way])) for way in ways]
    rows.append([f"**within 1.1 of the clean loss, of {num}**", *(f"**{count}**" for count in counts)])
    return render_table(["", *ways], rows)


def render_harm(results: Results) -> str:
    """Render how many healthy runs were changed, and by which rules."""
    ways = {"at_once": "acting at once (`Policy.eager()`)", "on_proof": "acting on proof (default)"}
    both = [results[way] for way in ways]
    rows = [[f"runs {word}", *(str(one["summary"][f"num_{word}"]) for one in both)] for word in HARMS]
    kinds = sorted({kind for one in both for kind in one["rules"]})
    rows += [[f"acted on by `{kind}`", *(str(one["rules"].get(kind, 0)) for one in both)] for kind in kinds]
    return render_table([f"of {both[0]['summary']['num_runs']} healthy runs", *ways.values()], rows)


def render_any_script(results: Results) -> str:
    """Render one row for each program."""
    header = [
        "program",
        "version",
        "started by",
        "guarded",
        "equal bits",
        "mean step, plain → guarded",
        "survived",
        "line",
    ]
    rows = [
        [
            name,
            ", ".join(f"{package} {version}" for package, version in outcome["versions"].items()),
            outcome["started"] or "python",
            *(show_answer(outcome[key]) for key in ("guarded", "equal_bits")),
            f"{outcome['plain_ms']:.2f} → {outcome['guarded_ms']:.2f} ms" if "cost" in outcome else "",
            show_answer(outcome["survived"]) if outcome["plain_dies"] else "plain too",
            show_answer(outcome["line_named"]),
        ]
        for name, outcome in results.items()
    ]
    return render_table(header, rows, left=range(len(header)))


def show_answer(answer: bool | None) -> str:
    """Return 'yes' or 'no', or a dash if it could not be determined."""
    return "–" if answer is None else "yes" if answer else "**no**"


HARMS = ("harmed", "halted", "warned")


def render_damage(results: Results) -> str:
    """Render every story in each way, then how often each rule found the damage."""
    stories, ways = results["stories"], ["unguarded", "acting at once", "Guard"]
    rows = [[name, *(show_runs(cells[way]) for way in ways)] for name, cells in stories.items()]
    num = sum(len(cells["Guard"]) for cells in stories.values())
    counts = [str(sum(is_saved(run) for cells in stories.values() for run in cells[way])) for way in ways]
    rows.append([f"**within 1.1 of the clean loss, of {num}**", *(f"**{count}**" for count in counts)])
    kinds = sorted({kind for cells in stories.values() for way in ways for run in cells[way] for kind in run["rules"]})
    rows += [[f"acted on by `{kind}`", *(str(count_runs(stories, way, kind)) for way in ways)] for kind in kinds]
    return render_table(["", *ways], rows)


def count_runs(stories: Results, way: str, kind: str) -> int:
    """Count the runs in which a rule acted."""
    return sum(kind in run["rules"] for cells in stories.values() for run in cells[way])


def show_runs(runs: list[dict[str, Any]]) -> str:
    """Return how many runs died or were halted, median and worst relative loss of the others, and the steps lost."""
    lived = [run["relative_loss"] for run in runs if not (run["died"] or run["halted"]) and run["relative_loss"]]
    parts = [f"{sum(run[key] for run in runs)} {key}" for key in ("died", "halted") if any(run[key] for run in runs)]
    if lived:
        parts.append(f"{statistics.median(lived):.3g} (worst {max(lived):.3g})")
    lost = statistics.median(run["num_steps_lost"] for run in runs)
    return ", ".join([*parts, *([f"{lost:.0f} lost"] if lost else [])])


def render_lr_sensitivity(results: Results) -> str:
    columns = results["columns"]
    rates = sorted({rate for one in columns.values() for rate in one["loss"]}, key=float)
    rows = [
        [rate, *(show_loss(one["loss"], rate, results["trains_below"]) for one in columns.values())] for rate in rates
    ]
    rows.append(["runs that train", *(f"{one['num_trained']} of {one['num_runs']}" for one in columns.values())])
    rows.append(["mean loss above the lowest", *(f"{one['mean_excess_loss']:.3f}" for one in columns.values())])
    size = results["size"]
    seeds = f"{results['num_seeds']} seed{'' if results['num_seeds'] == 1 else 's'}"
    facts = (
        f"{size['layers']} blocks of width {size['width']}, {size['steps']} steps of {size['batch']} x "
        f"{size['context']} symbols, {seeds}; the first loss is {results['first_loss']:.3f}, and no model can go below "
        f"{results['entropy']:.3f}. Bold: trains ({results['trains_below']:.3f} or less); -: not run."
    )
    return f"{facts}\n\n{render_table(['learning rate', *columns], rows)}"


def show_loss(cells: Results, rate: str, bound: float) -> str:
    """Return '1.243', in bold if it trained."""
    loss = cells.get(rate)
    if loss is None:
        return "NaN" if rate in cells else "-"
    return f"**{loss:.3f}**" if loss <= bound else f"{loss:.3f}"


def render_detectors(results: Results) -> str:
    tables = []
    for noise, rules in results["noise"].items():
        events = list(next(iter(rules.values()))["found"])
        rows = [
            [
                name,
                *(f"{share:.2f}" for share in one["found"].values()),
                show_delay(one),
                f"{one['false_alarms_per_1000']:.2f}",
            ]
            for name, one in rules.items()
        ]
        tables.append(render_table([f"noise: {noise}", *events, "delay, steps", "false alarms / 1000"], rows))
    return "\n\n".join(tables)


def show_delay(one: Results) -> str:
    return "-" if one["mean_delay_steps"] is None else f"{one['mean_delay_steps']:.1f}"


def render_diagnosis(results: Results) -> str:
    measured = results["step_bytes"] > 0  # memory is measured on a GPU only
    rows = [
        [
            name,
            f"{results[name]['ms']:.0f}",
            f"{results[name]['steps']:.1f}",
            f"{results[name]['memory']:.2f}" if measured else "-",
        ]
        for name in ("one sample overflows", "no sample is to blame")
    ]
    rows += [[f"a step, batch {results['batch']}", f"{results['step_ms']:.0f}", "1.0", "1.00" if measured else "-"]]
    return render_table(["", "milliseconds", "steps", "memory"], rows)


def render_proof(results: Results) -> str:
    """Render each test that a run paid for; a run without tests has one line."""
    rows = []
    for story, outcome in results.items():
        step = f"{outcome['step_milliseconds']:.1f} (mean {outcome['mean_step_milliseconds']:.1f})"
        tests = outcome["tests"] or [None]
        rows += [[story, step, *(["no test", "", "", ""] if test is None else show_test(test))] for test in tests]
    return render_table(["run", "step, ms", "test", "milliseconds", "steps", "memory"], rows)


def show_test(test: Results) -> list[str]:
    """Return 'weights: damaged', its milliseconds, the same in steps, and its memory peak over that of training."""
    memory = "" if test["memory_ratio"] is None else f"{test['memory_ratio']:.2f}"
    return [f"{test['what']}: {test['answer']}", f"{test['milliseconds']:.0f}", f"{test['steps']:.1f}", memory]


def render_checkpoint(results: Results) -> str:
    plain = results["torch_save_median_seconds"]
    rows = [["torch.save, fsynced: training waits for all of it", f"{plain:.3f}", "1.00"]]
    for key, words in (("stall", "training waits"), ("durable", "durable"), ("verified", "read back and verified")):
        taken = results[f"{key}_median_seconds"]
        rows.append([f"steadygrad: {words}", f"{taken:.3f}", f"{taken / plain:.2f}"])
    rows.append(["steadygrad: training waits, first save", f"{results['first_save_seconds']['stall']:.3f}", ""])
    size = f"{results['num_parameters'] / 1e6:.0f}M parameters, {results['state_bytes'] / 1e9:.1f} GB"
    return render_table([size, "seconds", "relative to torch.save"], rows)


def render_facts(results: Results) -> str:
    """Render names, without 'num', and numbers as they are."""
    return render_table(
        ["", ""], [[name.removeprefix("num_").replace("_", " "), show_plain(value)] for name, value in results.items()]
    )


def show_plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value).lower()


def render_scan(results: Results) -> str:
    rows = []
    for name, found in results.items():
        for way in found["peak_bytes"]:
            times = [f"{found[kind]['seconds'][way]:.2f}" for kind in ("warm", "cold")]
            rows.append([f"{name}: {way}", *times, f"{found['peak_bytes'][way] / 2**20:.0f}"])
    return render_table(["", "seconds, warm", "cold", "MiB"], rows)


def render_multiway(results: Results) -> str:
    sizes = results["all"]
    ways = list(dict.fromkeys(way for row in sizes.values() for way in row))
    rows = [[way, *(show_cost(row[way]) if way in row else "-" for row in sizes.values())] for way in ways]
    table = render_table(["all combinations", *sizes], rows)
    (size, fibre), *_ = results["fibre"].items()
    rows = [[way, show_cost(found)] for way, found in fibre.items()]
    table += f"\n\n{render_table([f'one vector exchanged, {size}', ''], rows)}"
    accuracy = results["accuracy"]
    rows = [
        [name, *(f"{row[name]['loss']:.0e}, {row[name]['gradients']:.0e}" for row in accuracy.values())]
        for name in next(iter(accuracy.values()))
    ]
    return f"{table}\n\n{render_table(['error of loss, gradients', *accuracy], rows)}"


def render_distributed(results: Results) -> str:
    ways = list(next(iter(results.values()))["milliseconds"])
    rows = [[way, *(f"{k['milliseconds'][way]:.0f} ({k['ratio'][way]:.2f})" for k in results.values())] for way in ways]
    rows += [
        [f"{key}, seconds", *(f"{k[f'{key}_seconds']:.2f}" for k in results.values())] for key in ("save", "resume")
    ]
    return render_table(["milliseconds (ratio)", *(kind.upper() for kind in results)], rows)


def render_forecast(results: Results) -> str:
    foreseeing = results["foreseeing"]
    rows = [
        [
            name,
            f"{one['auroc']:.3f}",
            f"{one['share_forecast']:.0%} of {one['num_onsets']}",
            f"{one['median_lead_steps']:.0f}",
            f"{one['false_alarms_per_1000']:.2f}",
        ]
        for name, one in foreseeing["rules"].items()
    ]
    header = ["on held-out programs", "AUROC", "onsets forecast", "median lead, steps", "false alarms / 1000"]
    return render_table(header, rows)


def render_tune(results: Results) -> str:
    rows = [
        [
            name,
            f"{row['given_lr']:.3g} to {row['tuned_lr']:.3g}",
            f"{row['share']:.1%}",
            show_losses(row["given"]),
            show_losses(row["tuned"]),
            show_verdict(row),
        ]
        for name, row in results.items()
    ]
    header = ["recipe", "learning rate", "share of the steps", "loss with given settings", "loss when tuned", "verdict"]
    return render_table(header, rows)


def show_verdict(row: dict[str, Any]) -> str:
    """Return 'within noise; better in 2 of 3 seeds'; for a repair, the loss that the recipe's own settings reach."""
    if "own" in row:
        return f"{row['verdict']}: its own rate ends at {row['own']:.4f}"
    if "num_better" not in row or row["verdict"] == "better":
        return str(row["verdict"])
    return f"{row['verdict']}; better in {row['num_better']} of {len(row['seeds'])} seeds"


def show_losses(losses: list[float | None]) -> str:
    """Return '0.0255 (0.0251 to 0.0262)'; runs halted before their first validation are counted."""
    known = [loss for loss in losses if loss is not None]
    if not known:
        return "halted"
    spread = f" ({min(known):.4f} to {max(known):.4f})" if len(known) > 1 else ""
    halted = f", {len(losses) - len(known)} halted" if len(known) < len(losses) else ""
    return f"{statistics.median(known):.4f}{spread}{halted}"


def render_looks(results: Results) -> str:
    """Render how much longer the steps around a look take than other ones."""
    settings = {(found["every"], found["around"]) for found in results.values()}
    about = " or ".join(f"A scan every {every} steps, measured over {around}" for every, around in sorted(settings))
    rows = [
        [
            f"{name}, {found['num_tensors']} tensors",
            *(
                f"{one['median_ms']:+.2f} (mean {one['mean_ms']:+.2f}), usually {one['usual_ms']:.1f}"
                for one in (found["host"], found["step"])
            ),
            str(found["launches"]["with"] - found["launches"]["without"]) if found["launches"] else "-",
        ]
        for name, found in results.items()
    ]
    table = render_table(["", "host, ms", "step, ms", "kernels and copies per scan"], rows)
    return f"{about}:\n\n{table}"


def render_recipes(results: Results) -> str:
    rows = [
        [name if way == "eager" else f"{name}, {way}", *show_recipe(found)]
        for name, ways in results.items()
        for way, found in ways.items()
    ]
    header = ["recipe", "what", "step, ms", "plain step, ms", "samples / s", "memory, GiB", "a poisoned batch"]
    return render_table(header, rows)


def show_recipe(found: Results) -> list[str]:
    """Return the cells of one recipe, or why it failed."""
    if "failed" in found:
        return [f"failed: {found['failed']}", *["-"] * 5]
    fault = "skipped, no weight touched" if found["survived"] else "not survived"
    memory = "-" if found["memory_gib"] is None else f"{found['memory_gib']:.1f}"
    numbers = [f"{found[key]:.1f}" for key in ("step_ms", "plain_step_ms", "samples_per_second")]
    return [found["about"], *numbers, memory, f"{fault}; {found['fault_seconds']} s"]


Render = Callable[[Results], str]
SECTIONS: dict[str, tuple[str, dict[str, Render]]] = {
    "A whole run": ("long_run.py", {f"long_run_{device}": render_long_run for device in ("cuda", "cpu")}),
    "What a periodic scan costs": ("looks.py", {f"looks_{device}": render_looks for device in ("cuda", "cpu")}),
    "A whole training step": (
        "whole_step.py",
        {f"whole_step_{device}": lambda r, d=device: render_whole_step(r, d) for device in ("cuda", "cpu")},
    ),
    "The guarded optimizer step": (
        "guarded_step.py",
        {f"guarded_step_{device}": lambda r, d=device: render_guarded_step(r, d) for device in ("cuda", "cpu")},
    ),
    "Other tools, in one table": ("peers/silent.py", {"peers_silent": render_all_peers}),
    "Other tools on four faults": ("peers/compare.py", {"peers": render_more_of_peers}),
    "Healthy trainings, with other tools": ("peers/harm.py", {"peers_harm": render_beside_harm}),
    "TrainCheck": ("peers/traincheck_runs.py", {"peers_traincheck": render_traincheck}),
    "Finding the cause": ("zoo.py", {"zoo": render_zoo}),
    "Errors that never crash": ("silent.py", {"silent": render_silent}),
    "Any script": ("any_script.py", {"any_script": render_any_script}),
    "Rescue": ("rescue.py", {"rescue": render_rescue}),
    "Damage that stays finite": ("finite_damage.py", {"finite_damage": render_damage}),
    "Healthy trainings, left alone": ("harm.py", {"harm": render_harm}),
    "What a proof costs": ("proof.py", {"proof_cuda": render_proof, "proof_cpu": render_proof}),
    "Learning rates that train": (
        "lr_sensitivity.py",
        {"lr_sensitivity_cuda": render_lr_sensitivity, "lr_sensitivity_cpu": render_lr_sensitivity},
    ),
    "Loss spikes": ("detectors.py", {"detectors": render_detectors}),
    "The forecast": ("forecast/compare.py", {"forecast": render_forecast}),
    "Tuning": ("tune.py", {"tune": render_tune}),
    "What a diagnosis costs": ("diagnosis.py", {"diagnosis_cuda": render_diagnosis, "diagnosis_cpu": render_diagnosis}),
    "Checkpoints": ("checkpoint.py", {"checkpoint_cuda": render_checkpoint, "checkpoint_cpu": render_checkpoint}),
    "Killed while saving": ("crash.py", {"crash": render_facts}),
    "Scanning a checkpoint": ("scan.py", {"scan": render_scan}),
    "The multiway loss": ("multiway.py", {"multiway_cuda": render_multiway}),
    "The recipes at a real size": ("recipes_gpu.py", {"recipes_gpu": render_recipes}),
    "Two ranks": ("distributed.py", {"distributed_cpu": render_distributed}),
    "Reports": ("report.py", {"report": render_facts, "report_live": render_facts}),
}
"""Title -> the program, and its results files with the function that renders each."""
UNPUBLISHED = {
    "story": "the README's picture",
    "multiway_tiles": "how the kernels' tile sizes were chosen",
}
"""Results files without a section, and what they are for."""
