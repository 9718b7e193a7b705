"""An environment of their own for the peers -> the comparison, run there.

It lies in a cache folder ($XDG_CACHE_HOME or ~/.cache, then steadygrad/peers; or --folder), uses the torch of this
environment instead of loading another, and holds what requirements.txt pins. Nothing here is changed. What pip cannot
install is said, and the comparison goes on without it.

    python benchmarks/peers/environment.py [--folder DIR] [--harm | --silent | --traincheck] [-q]
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
KEPT = ("torch", "numpy")
"""What the peers must take as it is here."""
PROGRAMS = {
    "harm": ("harm.py", "what they do to healthy trainings"),
    "silent": ("silent.py", "which errors that never crash they notice"),
    "traincheck": ("traincheck_runs.py", "which of those TrainCheck notices; takes an hour"),
}
"""What is run instead of compare.py."""


def find_cache() -> Path:
    """The folder that the environment is made in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadygrad" / "peers"


def make_environment(folder: Path) -> Path:
    """A venv that sees this one's packages behind its own; its python."""
    python = folder / "bin" / "python"
    if not python.is_file():
        venv.create(folder, with_pip=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Own packages come first on the path: what is installed there wins over what is here.
    link = folder / "lib" / version / "site-packages" / "zz_this_environment.pth"
    link.write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return python


def install(python: Path, folder: Path) -> list[str]:
    """Install each peer; those that pip could not."""
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in KEPT), encoding="utf-8")
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    failed = []
    for peer in (line for line in lines if line and not line.startswith("#")):
        command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins), peer]
        print(f"installing {peer} ...", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(peer)
    return failed


def main() -> int:
    """Make, install, run; the comparison's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=find_cache(), help="where the environment is made")
    parser.add_argument("-q", dest="quick", action="store_true", help="what the comparison calls quick")
    parser.set_defaults(program="compare.py")
    for name, (program, about) in PROGRAMS.items():
        parser.add_argument(f"--{name}", dest="program", action="store_const", const=program, help=about)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    python = make_environment(arguments.folder)
    failed = install(python, arguments.folder)
    if failed:
        print(f"pip could not install {', '.join(failed)}: left out.", file=sys.stderr)
    root = HERE.parent.parent
    paths = os.pathsep.join([str(root / "src"), str(HERE.parent)])
    command = [str(python), str(HERE / arguments.program), *(["--quick"] if arguments.quick else [])]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
