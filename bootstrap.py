"""Makes `.venv` from requirements.lock: what a fresh clone needs before its first command.

    python3 bootstrap.py
    .venv/bin/python bootstrap.py uv ARG...   run uv with pip's settings

A fresh machine has Python, git and make, so this file uses the standard library only. uv installs
the lock because it is several times faster than pip; where uv fails, pip installs the same lock.
Both check the hash of every package. The stamp `.venv/.stamp` says what the environment was made
from. It is removed before the first change and written after the last, so an interrupted run starts
again.
"""

from __future__ import annotations  # an older Python must get as far as its refusal

import ast
import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent

UV = "uv==0.13.8"
LOCKED = ("--quiet", "--require-hashes", "--only-binary", ":all:", "-r", "requirements.lock")

UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""pip's setting -> uv's variable."""

Run = Callable[[Sequence[str], Mapping[str, str]], str]
"""Runs a command in the checkout with extra variables, and returns its output.

Raises OSError or CalledProcessError."""


def refresh(root: Path, run: Run) -> None:
    """Bring the environment of a checkout to what its lock says."""
    stamp, python = root / ".venv/.stamp", root / ".venv/bin/python"
    wanted = fingerprint(root, sys.version_info[:2])
    found = stamp.read_text() if stamp.exists() and python.exists() else ""
    if found != wanted:
        stamp.unlink(missing_ok=True)
        if found.splitlines()[:1] != wanted.splitlines()[:1]:
            say("making .venv ...")
            run([sys.executable, "-m", "venv", "--clear", ".venv"], {})
        pip = [str(python), "-m", "pip"]
        install_packages(pip, run)
        say("installing Muster ...")
        # The lock holds the build backend, so this needs nothing from the network.
        run([*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", "."], {})
    # Written even if nothing changed: make compares its age with that of the lock.
    stamp.write_text(wanted)


def install_packages(pip: Sequence[str], run: Run) -> None:
    """Install the lock with uv, or with pip if uv does not work here."""
    say("installing the locked packages ...")
    try:
        run_uv(pip, run, ["pip", "install", "--compile-bytecode", *LOCKED])
    except (OSError, subprocess.CalledProcessError):
        say("uv does not work here; installing the same lock with pip ...")
        run([*pip, "install", *LOCKED], {})


def run_uv(pip: Sequence[str], run: Run, arguments: Sequence[str]) -> None:
    """Run uv, installed if necessary, with pip's settings."""
    run([*pip, "install", "--quiet", "--only-binary", ":all:", UV], {})
    variables = uv_variables(run([*pip, "config", "list"], {}), os.environ)
    run([pip[0], "-m", "uv", *arguments], variables)


def uv_variables(listing: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Translate the output of `pip config list` into uv's variables; those that are set win."""
    # pip takes the best version of all indexes, uv that of the first. The hashes make both safe.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    pattern = r"""^(global|install|:env:)\.([\w-]+)=(['"].*['"])$"""
    found = re.findall(pattern, listing, re.MULTILINE)
    for _, name, value in sorted(found, key=lambda it: ["global", "install", ":env:"].index(it[0])):
        if name in UV_VARIABLES:
            separator = "," if name == "find-links" else " "
            variables[UV_VARIABLES[name]] = separator.join(str(ast.literal_eval(value)).split())
    return {name: value for name, value in variables.items() if name not in environment}


def fingerprint(root: Path, version: tuple[int, ...]) -> str:
    """Return two lines that identify an environment.

    If the first differs it has to be made anew, because its scripts name the folder and the Python.
    If only the second differs, installing into it is enough.
    """
    digest = hashlib.sha256()
    for name in ("requirements.lock", "pyproject.toml"):
        digest.update(hashlib.sha256((root / name).read_bytes()).digest())
    return f"Python {'.'.join(map(str, version))} in {root}\n{digest.hexdigest()}\n"


def missing_requirement(version: tuple[int, ...]) -> str | None:
    """Return what a person has to install first, if anything."""
    name = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return f"Muster needs Python 3.11 or newer and this is {name}: try make PYTHON=python3.12"
    if find_spec("ensurepip") is None:
        return (
            f"{sys.executable} cannot make virtual environments (no ensurepip): on Debian and "
            f"Ubuntu run `apt-get install python{name}-venv`, then the same command again"
        )
    return None


def run_in_root(command: Sequence[str], variables: Mapping[str, str]) -> str:
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def say(line: str) -> None:
    print(f"bootstrap: {line}", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["uv"]:
        run_uv([sys.executable, "-m", "pip"], run_in_root, sys.argv[2:])
        return 0
    missing = missing_requirement(sys.version_info[:2])
    if missing:
        say(missing)
        return 1
    try:
        # The lock of a file that always exists: .venv is emptied meanwhile.
        with (ROOT / "requirements.lock").open("r+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            refresh(ROOT, run_in_root)
    except subprocess.CalledProcessError as error:
        say(f"`{' '.join(error.cmd)}` failed; correct what it printed and run the command again")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command starts again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
