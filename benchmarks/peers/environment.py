"""Creates a separate environment for the peers and runs the comparison there.

It is created in a cache folder ($XDG_CACHE_HOME or ~/.cache, then steadygrad/peers; or --folder), uses the torch of the
current environment instead of downloading another, and contains what requirements.txt pins. The current environment is
not changed. Packages that pip cannot install are reported, and the comparison runs without them.

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
"""Packages that the peers must use as installed here."""
PROGRAMS = {
    "harm": ("harm.py", "what they do to healthy trainings"),
    "silent": ("silent.py", "which errors that never crash they notice"),
    "traincheck": ("traincheck_runs.py", "which of those TrainCheck notices; takes an hour"),
}
"""Programs that can run instead of compare.py."""


def find_cache() -> Path:
    """Return the folder of the environment."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadygrad" / "peers"


def make_environment(folder: Path) -> Path:
    """Create a venv that falls back to the current packages; return its python."""
    python = folder / "bin" / "python"
    if not python.is_file():
        venv.create(folder, with_pip=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # The venv's packages come first on the path, so what is installed there wins.
    link = folder / "lib" / version / "site-packages" / "zz_this_environment.pth"
    link.write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return python


def install(python: Path, folder: Path) -> list[str]:
    """Install each peer; return those that pip could not install."""
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
    """Create, install, run; return the comparison's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=find_cache(), help="where to create the environment")
    parser.add_argument("-q", dest="quick", action="store_true", help="pass --quick to the comparison")
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
