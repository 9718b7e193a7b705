"""The command line: arguments in, text and an exit code out. The packages below do the work.

Exit codes: 0 did its job; 1 found something (a command that looks for it says so in its help); 2 could not do it.
click, rich and torch are loaded by the command that needs them, so that `steadygrad --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from steadygrad.cli.exit_codes import DONE, FAILED

__all__ = ["main", "run_program"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""

    def load() -> Any:
        from steadygrad.cli.commands import steadygrad

        return steadygrad

    return _run(load, arguments, "steadygrad")


def run_program(module: str, arguments: Sequence[str] | None = None) -> int:
    """Run a training of your own as `steadygrad train` runs a recipe; return the exit code.

    `module` offers what a recipe does: `SUMMARY`, `Config`, `QUICK` and `train`. `steadygrad new` writes one.
    """

    def load() -> Any:
        from steadygrad.cli.recipes import Recipe
        from steadygrad.cli.train import RecipeCommand

        name = module.rpartition(".")[2]
        return RecipeCommand(Recipe(name, module, program=f"python -m {module}"))

    return _run(load, arguments, f"python -m {module}")


def _run(load: Callable[[], Any], arguments: Sequence[str] | None, name: str) -> int:
    """Run the command that `load` returns, and turn what it raises into words and an exit code."""
    try:
        import click
    except ImportError:
        print("steadygrad's command line needs click, which is not installed. Run: pip install click", file=sys.stderr)
        return FAILED
    from steadygrad.errors import SteadygradError

    try:
        # Not standalone: click would end the process itself, with codes of its own (1 for Ctrl-C)
        code = load().main(args=arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return FAILED
    except click.Abort:
        print("Interrupted.", file=sys.stderr)
        return FAILED
    except SteadygradError as error:
        _print_error(str(error))
        return FAILED
    # A file that cannot be read or written is the user's to mend: no traceback
    except OSError as error:
        _print_error(_describe_os_error(error))
        return FAILED
    except ImportError as error:
        _print_error(f"{error}. Run: pip install steadygrad, which installs what it needs.")
        return FAILED
    except Exception:
        # Our own defect. Python's exit code for it is 1, which would read as "found something".
        import traceback

        traceback.print_exc()
        return FAILED
    return code if isinstance(code, int) else DONE  # a command without context.exit returns None


def _describe_os_error(error: OSError) -> str:
    if not error.filename or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}. Check that the path is right, and that it may be read and written."


def _print_error(text: str) -> None:
    from steadygrad.cli.console import Console

    Console(sys.stderr).say(f"Error: {text}")
