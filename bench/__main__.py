"""Runs every benchmark of this folder, one after another: they would disturb each other."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run_all(scripts: Sequence[Path], run: Callable[[Path], int]) -> list[str]:
    """Run each script under a heading and return the names of those that failed."""
    failed = []
    for script in scripts:
        print(f"\n== {script.stem} ==", flush=True)
        if run(script) != 0:
            failed.append(script.stem)
    return failed


def run_script(script: Path) -> int:
    return subprocess.run([sys.executable, str(script)], check=False).returncode


def main() -> int:
    here = Path(__file__).parent
    # Without this one, and the one that reads a trace.
    scripts = sorted(it for it in here.glob("[!_]*.py") if it.stem != "timeline")
    failed = run_all(scripts, run_script)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
