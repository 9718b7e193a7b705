"""`steadygrad doctor SCRIPT`: the first steps of a training with every check on -> what was checked and found.

The script runs unedited and unchanged, in this process, until it has made enough steps. Nothing is recorded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from steadygrad.cli.console import Console
from steadygrad.cli.exit_codes import DONE, FAILED, FOUND
from steadygrad.config import DetectConfig, GuardConfig, MeasureConfig
from steadygrad.detect.checklist import CheckSheet
from steadygrad.facts import Finding, Incident


class EnoughSteps(SystemExit):
    """Ends the script from inside an optimizer's step. Not an Exception, so that `except Exception` lets it pass."""


def check_script(
    console: Console, script: str, arguments: Sequence[str], *, num_steps: int, as_json: bool = False
) -> int:
    """Run the first `num_steps` steps of `script`, print what was checked and found, and return the exit code."""
    from steadygrad.adapters.scripts.arrival import when_torch_arrives
    from steadygrad.adapters.scripts.launch import launch

    sheet = CheckSheet()

    def begin() -> None:
        from steadygrad.adapters.scripts.options import Options
        from steadygrad.adapters.scripts.session import Session

        Session(Options(config=make_config(sheet, num_steps), observe=True)).begin()
        _stop_after(num_steps + 1)  # the last step is not judged: the script ends inside it

    # Not now: the script may set environment variables that count only before torch is imported
    when_torch_arrives(begin)
    failed = False
    try:
        launch(script, arguments, as_module=False)
    except EnoughSteps:
        pass
    except SystemExit as ended:
        failed = ended.code not in (None, 0)
    (_print_json if as_json else _print_sheet)(console, script, sheet)
    if not sheet.num_steps or failed:
        return FAILED
    return FOUND if sheet.findings else DONE


def make_config(sheet: CheckSheet, num_steps: int) -> GuardConfig:
    """Return settings that scan often and report to `sheet`."""

    def note(incident: Incident) -> None:
        sheet.findings += [incident.finding, *incident.also]

    return GuardConfig(
        measure=MeasureConfig(scan_every=max(1, num_steps // 8)),
        # As the user's rule it hears every fact, and finds nothing
        detect=DetectConfig(rules=(sheet,)),
        on_incident=note,
    )


def _stop_after(num_steps: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made >= num_steps:
            raise EnoughSteps(0)

    # Global, for optimizers of every kind; it is never removed, because the command ends after the script
    register_optimizer_step_post_hook(count)


def _print_sheet(console: Console, script: str, sheet: CheckSheet) -> None:
    if not sheet.num_steps:
        console.say(f"{script} took no optimizer step, so nothing was checked.", "red")
        return
    console.say(f"Checked the first {sheet.num_steps} steps of {script}")
    for title, passed, found in sheet.fill():
        if passed is None:
            console.say(f"  -      {title} (nothing of the kind was seen)")
        elif passed:
            console.say(f"  ok     {title}", "green")
        else:
            console.say(f"  FOUND  {title}", "red")
            for finding in found:
                _print_finding(console, finding)


def _print_finding(console: Console, finding: Finding) -> None:
    console.say(f"           {finding.kind}, step {finding.step}: {finding.message}")
    console.say(f"           Fix: {finding.advice}")


def _print_json(console: Console, script: str, sheet: CheckSheet) -> None:
    rows = [
        {"check": title, "passed": passed, "found": [dataclasses.asdict(finding) for finding in found]}
        for title, passed, found in sheet.fill()
    ]
    console.say(json.dumps({"script": script, "num_steps": sheet.num_steps, "checks": rows}, indent=1, default=str))
