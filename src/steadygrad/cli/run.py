"""`steadygrad run`: any unedited training script, kept from bad steps and recorded.

Arguments in, the script's own exit code out, unless `--fail-on` asks for another. Messages go to standard error.
"""

from __future__ import annotations

import datetime
import os
import threading
from pathlib import Path

import click

from steadygrad.cli.exit_codes import FOUND
from steadygrad.config.switch import is_switched_off


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "as_module", is_flag=True, help="Run a module, as python -m does.")
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write the record.  [default: runs/<script>-<time>]",
)
@click.option("--observe", is_flag=True, help="Only watch: skip nothing, change nothing.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A YAML or TOML file with a GuardConfig: thresholds, diagnosis, what to record.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["warning", "error", "critical"]),
    help="Exit with 1, even if the script succeeded, if an incident was this severe or worse, or nothing was guarded.",
)
@click.argument("target", metavar="SCRIPT|MODULE|COMMAND")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run(
    as_module: bool,
    run_dir: Path | None,
    observe: bool,
    config_file: Path | None,
    fail_on: str | None,
    target: str,
    arguments: tuple[str, ...],
) -> None:
    """Guard a PyTorch training script without editing it.

    Guards every optimizer that the script or its child processes create: a step with a non-finite loss or gradient is
    skipped and reported. Options go before the script; everything after it is passed to the script. The exit code is
    the script's, unless --fail-on is given, and standard output is untouched.

    \b
    Example:
      steadygrad run --run-dir runs/a train.py --epochs 3
      steadygrad run --observe -m my_package.train
      steadygrad run accelerate launch train.py
      torchrun --nproc-per-node 2 -m steadygrad run train.py
    """
    from steadygrad.adapters.scripts.launch import launch
    from steadygrad.adapters.scripts.options import Options
    from steadygrad.adapters.scripts.whole_run import WholeRun
    from steadygrad.config import GuardConfig

    config = GuardConfig() if config_file is None else GuardConfig.load(config_file)
    folder = run_dir.absolute() if run_dir is not None else _name_folder(target)  # the script may change directory
    # Before anything is set up: STEADYGRAD=off must leave the plain script
    if is_switched_off():
        launch(target, arguments, as_module=as_module)
        return
    whole = WholeRun(Options(config=config, observe=observe, run_dir=folder), fail_on=fail_on)
    whole.begin()
    try:
        launch(target, arguments, as_module=as_module)
    except SystemExit as leaving:
        # sys.exit() of a script that ended well still has to reach whole.end(); any other code is the script's own
        if leaving.code not in (None, 0):
            raise
    _wait_for_threads()
    if whole.end():
        raise SystemExit(FOUND)


def _wait_for_threads() -> None:
    """Wait for the script's threads, which may still train: Python does so before it runs any exit handler."""
    if any(thread is not threading.current_thread() and not thread.daemon for thread in threading.enumerate()):
        # Private. Not join(): idle workers of a ThreadPoolExecutor end only when this tells them to.
        threading._shutdown()  # type: ignore[attr-defined]


def _name_folder(target: str) -> Path | None:
    """Return a name such as runs/train-20260131-101500; without --run-dir only the first of several ranks writes."""
    # Each rank would otherwise read its own clock and make its own folder
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    name = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
    name = f"{Path(name).name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    parent = Path.cwd() / "runs"
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())
