"""Turns the results of benchmarks/peers into their tables in docs/benchmarks.md: one joint table and one per program.

Counts and ratios come from the results files. Where a peer has the better number, a sentence made from the same results
says so.
"""

from __future__ import annotations

from tables import RESULTS, Results, find_command, read, render_table

GUARD, UNCLIPPED, TRAINCHECK = "steadygrad Guard", "steadygrad Guard, clip=None", "TrainCheck"
OWN_HARMS = {"changed": "harmed", "missed": "harmed", "stopped": "halted", "warned": "warned"}
"""Our column -> its name in the results of benchmarks/harm.py."""
HARMS_OF_PEERS = ("stopped", "withheld", "changed", "missed", "warned")
Figures = dict[str, float]
"""By column; columns that were not measured are missing."""
WORDS = {
    "changed": "fewer healthy trainings changed",
    "missed": "fewer healthy trainings that miss their goal",
    "stopped": "fewer healthy trainings stopped",
    "warned": "fewer healthy trainings with a warning",
    "apart": "more silent errors told apart from their twins",
    "alarms": "fewer false alarms",
    "cost": "a cheaper mean step",
}
"""What a better number means, by column."""


# --- one table --------------------------------------------------------------------------------------------------------


def render_all_peers(results: Results) -> str:
    """Render what each peer and a Guard do to healthy trainings, which silent errors they notice, and their cost."""
    harm, own_harm, silent, learnt = (
        read(RESULTS, name) for name in ("peers_harm", "harm", "silent", "peers_traincheck")
    )
    rows: dict[str, tuple[str, Figures, str]] = {}
    for name, one in results["peers"].items():
        figures = {"noticed": one["num_noticed"], "apart": one["num_told_apart"], "alarms": one["num_alarms"]}
        rows[name] = (one["source"], {**figures, **find_harms(name, harm), "cost": results["cost"][name]}, "")
    if learnt is not None:
        rows[TRAINCHECK] = (learnt["results"]["source"], *count_learnt(learnt["results"]))
    if silent is not None:
        figures = count_own(silent["results"]["cases"], results["cases"])
        rows[GUARD] = ("this repository", {**figures, **find_harms(GUARD, harm), "cost": results["cost"][GUARD]}, "")
    if own_harm is not None and harm is not None:
        rows[UNCLIPPED] = ("this repository", count_unclipped(own_harm["results"], harm["results"]), "")
    num_runs = harm["results"]["num_runs"] if harm else 0
    return "\n\n".join(
        [
            render_rows(rows, num_runs, results["num_faulty"], results["num_healthy"]),
            say_who_is_better({name: row[1] for name, row in rows.items() if name not in (TRAINCHECK, UNCLIPPED)}),
            *([say_traincheck(learnt["results"])] if learnt else []),
            f"Where each figure comes from: {say_commands()}.",
        ]
    )


def find_harms(name: str, harm: Results | None) -> Figures:
    """Return what a peer did to healthy trainings."""
    one = harm["results"]["peers"].get(name) if harm else None
    return {key: one[f"num_{key}"] for key in OWN_HARMS} if one else {}


def count_own(cases: Results, asked: Results) -> Figures:
    """Count what a Guard named among the cases that the peers were tried on."""
    found = {name: cases[name] for name in asked if name in cases}
    named = {name for name, one in found.items() if one["kind"] and one["named"]}
    return {
        "noticed": len(named),
        "apart": sum(not found[name]["alarms"] for name in named),
        "alarms": sum(bool(one["alarms"]) for one in found.values()),
    }


def count_unclipped(own: Results, harm: Results) -> Figures:
    """Count what a Guard without clipping did to the trainings that the peers were tried on."""
    found, these = own["on_proof"]["summary"], {*harm["scenarios"]}
    return {key: len(these & {*found[theirs]}) for key, theirs in OWN_HARMS.items()}


def count_learnt(learnt: Results) -> tuple[Figures, str]:
    """Return TrainCheck's numbers, and how many cases they come from."""
    summary = learnt["summary"]
    figures = {"noticed": summary["num_noticed"], "apart": summary["num_told_apart"], "alarms": summary["num_alarms"]}
    if "ratio" in learnt["cost"]:
        figures["cost"] = learnt["cost"]["ratio"]
    return figures, f" of {summary['num_done']}"


def render_rows(rows: dict[str, tuple[str, Figures, str]], num_runs: int, num_faulty: int, num_healthy: int) -> str:
    """Render the table, with a dash where nothing was measured."""
    keys = ("changed", "missed", "stopped", "warned", "noticed", "apart", "alarms")
    healthy, silent = f"of {num_runs} healthy trainings", f"of {num_faulty} silent errors"
    header = ["", "from", f"{healthy}: changed", "goal missed", "stopped", "warned", f"{silent}: noticed", "told apart"]
    header += [f"false alarms on {num_healthy} programs without errors", "mean step"]
    lines = []
    for name, (source, figures, part) in rows.items():
        mark = "**" if name.startswith(GUARD) else ""
        cells = [f"{figures[key]:.0f}{part}" if key in figures else "–" for key in keys]
        cells.append(f"{figures['cost']:.2f}x" if "cost" in figures else "–")
        lines.append(
            [f"{mark}{name}{mark}", source, *(cell if cell == "–" else f"{mark}{cell}{mark}" for cell in cells)]
        )
    return render_table(header, lines, left=(0, 1))


def say_who_is_better(rows: dict[str, Figures]) -> str:
    """Return a sentence that lists where peers have the better number."""
    ours = rows.get(GUARD, {})
    found = []
    for key, words in WORDS.items():
        sign = -1 if key == "apart" else 1
        better = {
            name: show_figure(key, figures[key])
            for name, figures in rows.items()
            if key in ours and key in figures and sign * figures[key] < sign * ours[key]
        }
        own = show_figure(key, ours.get(key, 0))
        shown = [f"{name} {figure}" for name, figure in better.items() if figure != own]
        if shown:
            found.append(f"{words}: {', '.join(shown)} (Guard {own})")
    return f"**Where another tool is better** than a Guard at its defaults: {'; '.join(found)}." if found else ""


def show_figure(key: str, figure: float) -> str:
    return f"{figure:.2f}x" if key == "cost" else f"{figure:.0f}"


def say_traincheck(learnt: Results) -> str:
    """Return a note on how to read TrainCheck's row."""
    summary = learnt["summary"]
    return (
        f"TrainCheck learns from a good run of the same program, which no other row needs. It was tried on "
        f"{summary['num_cases']} of the errors ({summary['num_done']} completed, {summary['mean_seconds']:.0f} s "
        f"per case{say_load(learnt)}) and not on the healthy trainings. Nearly every run with another seed violates "
        f"some invariant, so `told apart` counts errors that violate one that the healthy twin does not; the twin "
        f"with a third seed did so in "
        f"{summary['num_twins_apart']} of {summary['num_done']} cases."
    )


def say_load(learnt: Results) -> str:
    """Return the load of the machine, on which the seconds depend."""
    return f" at a load average of {learnt['load_average']:.0f}" if "load_average" in learnt else ""


def say_commands() -> str:
    """Return the command of each results file, with what it measures."""
    places = {
        "healthy trainings": ("peers_harm", "harm"),
        "silent errors and cost": ("peers_silent", "silent"),
        "TrainCheck": ("peers_traincheck",),
    }
    shown = {
        what: [f"`{find_command(name, {})}`" for name in names if read(RESULTS, name)] for what, names in places.items()
    }
    return "; ".join(f"{what}: {' and '.join(commands)}" for what, commands in shown.items() if commands)


def render_traincheck(results: Results) -> str:
    """Render each case: how many invariants were inferred and violated, and how long it took."""
    rows = [
        [
            name,
            *(["failed", "", "", ""] if one["failed"] else show_violations(one)),
            f"{sum(one['seconds'].values()):.0f}",
        ]
        for name, one in results["cases"].items()
    ]
    header = ["case", "invariants", "violated by the error", "... but not by the twin", "by the twin", "seconds"]
    return "\n\n".join([render_table(header, rows), *say_failures(results), say_cost(results["cost"])])


def show_violations(one: Results) -> list[str]:
    apart = {*one["error"]} - {*one["twin"]}
    return [str(one["num_invariants"]), str(len(one["error"])), str(len(apart)), str(len(one["twin"]))]


def say_failures(results: Results) -> list[str]:
    """Return what it printed in each failed case."""
    return [
        f"`{name}` failed: `{' '.join(one['failed'].split())[-200:]}`"
        for name, one in results["cases"].items()
        if one["failed"]
    ]


def say_cost(cost: Results) -> str:
    if "ratio" not in cost:
        return f"The cost of a step could not be measured: `{cost.get('failed', 'not run')}`"
    return (
        f"Mean step of the 10M-parameter GPT over {cost['num_steps']} steps, traced for {cost['num_invariants']} "
        f"invariants: {cost['traced_ms']:.0f} ms instead of {cost['plain_ms']:.0f} ms, {cost['ratio']:.2f}x."
    )


# --- a table for each program -----------------------------------------------------------------------------------------


def render_peer_table(results: Results) -> str:
    """Render what each peer noticed, kept out of the weights, survived and named, and what it costs."""
    keys = ("noticed", "saved", "goes_on", "op", "line", "module", "sample")
    header = ["", "from", "noticed", "weights saved", "continues", "op", "line", "module", "sample", "a healthy step"]
    rows = []
    for name, one in results["peers"].items():
        mark = "**" if name.startswith("steadygrad") else ""
        cells = [name, *(str(one["counts"][key]) for key in keys), f"{one['cost']:.2f}x"]
        shown = [f"{mark}{cell}{mark}" for cell in cells]
        rows.append([shown[0], one["source"], *shown[1:]])
    num = results["num_faults"]
    least = min(one["cost"] for one in results["peers"].values())
    note = f"Counts of {num} faults; line and module of {num - 1}, since one fault is in the data."
    if least < 1.0:  # every other way does what the first one does, and more
        note += f" Noise of the costs: a row with more work than the first one was measured at {least:.2f}x."
    return f"{render_table(header, rows, left=(0, 1))}\n\n{note}"


def render_more_of_peers(results: Results) -> str:
    """Render the table of faults, and what else was measured."""
    notes = []
    if results["missing"]:
        notes.append(f"Not installed when this was measured: {', '.join(results['missing'])}.")
    symile = results.get("symile")
    if symile:
        ours, theirs = symile["steadygrad"], symile["symile"]
        notes.append(
            f"`symile` over {symile['num_modalities']} modalities, all combinations, batch {symile['batch']}: loss "
            f"{theirs['loss']:.5f} in {theirs['milliseconds']:.1f} ms; `multiway_contrastive`: {ours['loss']:.5f} in "
            f"{ours['milliseconds']:.1f} ms (forward and backward)."
        )
    return "\n\n".join([render_peer_table(results), *notes])


def render_peers_harm(results: Results, own: Results | None) -> str:
    """Render what each peer did to healthy trainings, and what a Guard did to the same ones."""
    header = ["", "from", "runs", "stopped", "steps withheld", "weights changed", "missed", "warned"]
    rows = [
        [
            f"**{name}**" if name == GUARD else name,
            one["source"],
            str(results["num_runs"]),
            *(str(one[f"num_{key}"]) for key in HARMS_OF_PEERS),
        ]
        for name, one in results["peers"].items()
    ]
    if own is not None:
        found, these = own["on_proof"]["summary"], {*results["scenarios"]}
        counts = [len(these & {*found[key]}) for key in ("halted", "acted_on", "harmed", "harmed", "warned")]
        rows.append([f"**{UNCLIPPED}**", "`benchmarks/harm.py`", str(results["num_runs"]), *map(str, counts)])
    note = "" if results["every"] == 1 else f"\n\nEvery {results['every']}th scenario, the same ones in all rows."
    return f"{render_table(header, rows, left=(0, 1))}{note}"


def render_beside_harm(results: Results) -> str:
    """Render the peers on the healthy corpus, with the Guard's row from its own results."""
    own = read(RESULTS, "harm")
    return render_peers_harm(results, own and own["results"])
