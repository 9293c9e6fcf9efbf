"""Makes `.venv` from the committed lock: what stands between a fresh clone and the first command.

    python3 bootstrap.py             make or refresh .venv; nothing to do costs nothing
    python3 bootstrap.py uv ARG...   run the environment's uv under pip's configuration

A fresh machine has Python and git, so this file needs the standard library only. It ends in the
stamp `.venv/.stamp`, removed before the first change and written after the last: an environment
without a stamp was interrupted and is made anew. uv installs the lock because it is several times
faster than pip; whatever goes wrong with uv, pip installs the same lock. Both check every hash, and
both find packages where pip's own configuration says: no address is written down here.
"""

from __future__ import annotations  # an older Python must get as far as the refusal in `main`

import ast
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

OLDEST_PYTHON = (3, 11)
UV = "uv==0.13.8"
LOCKED = ("--quiet", "--require-hashes", "--only-binary", ":all:", "-r", "requirements.lock")
# The lock holds the build backend, so the project itself needs nothing that is not installed yet.
PROJECT = ("--quiet", "--no-deps", "--no-build-isolation", "-e", ".")

# What pip calls it -> what uv calls it. pip separates several values by white space.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
UV_SEPARATORS = {"UV_FIND_LINKS": ","}


class CannotBootstrap(Exception):
    """The machine lacks something that a person has to bring."""


class Run(Protocol):
    def __call__(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        """Run a command with variables added to the environment and return its output.

        Raises OSError if it cannot be started and CalledProcessError if it fails.
        """


@dataclass(frozen=True)
class Bootstrap:
    """Brings the `.venv` of one checkout to what its lock says."""

    root: Path
    run: Run

    @property
    def stamp(self) -> Path:
        return self.root / ".venv/.stamp"

    @property
    def python(self) -> str:
        return str(self.root / ".venv/bin/python")

    def refresh(self) -> None:
        """Leave a complete environment behind, or no stamp."""
        wanted = fingerprint(self.root, sys.version_info[:2])
        found = self._stamped()
        if found != wanted:
            self.stamp.unlink(missing_ok=True)
            if found.splitlines()[:1] != wanted.splitlines()[:1]:
                self._make_environment()
            self._install()
        # Also when nothing changed: make compares the stamp's age with that of the lock.
        self.stamp.write_text(wanted)

    def _stamped(self) -> str:
        """Return the stamp of an environment that can be used, else nothing."""
        usable = self.stamp.exists() and Path(self.python).exists()
        return self.stamp.read_text() if usable else ""

    def _make_environment(self) -> None:
        refuse_without_ensurepip(sys.version_info[:2])
        with step("making .venv"):
            self.run([sys.executable, "-m", "venv", "--clear", ".venv"], {})

    def _install(self) -> None:
        try:
            self._install_with_uv()
        except (OSError, subprocess.CalledProcessError) as failure:
            say(explain(failure))
            say("uv does not work here: pip installs the same lock instead")
            self._install_with_pip()
        self._compile()

    def _install_with_uv(self) -> None:
        with step(f"installing {UV}"):
            self._pip("install", "--quiet", "--only-binary", ":all:", UV)
        with step("installing the locked packages with uv"):
            self.uv("pip", "install", "--python", self.python, "--compile-bytecode", *LOCKED)
        with step("installing Muster"):
            self.uv("pip", "install", "--python", self.python, *PROJECT)

    def _install_with_pip(self) -> None:
        with step("installing the locked packages with pip"):
            self._pip("install", *LOCKED)
        with step("installing Muster"):
            self._pip("install", *PROJECT)

    def _compile(self) -> None:
        """Compile our own packages now, because Python may be forbidden to do it when they run."""
        packages = sorted(face.parent.name for face in self.root.glob("*/__init__.py"))
        # A file that does not compile is for `make check` to report, where it can be mended.
        with suppress(subprocess.CalledProcessError):
            self.run([self.python, "-m", "compileall", "-qq", *packages], {})

    def _pip(self, *arguments: str) -> str:
        return self.run([self.python, "-m", "pip", *arguments], {})

    def uv(self, *arguments: str) -> str:
        """Run the environment's uv as pip is configured to run."""
        settings = read_pip_settings(self._pip("config", "list"))
        # uv knows every setting as a variable but this one.
        no_index = ["--no-index"] if settings.get("no-index") in {"1", "true", "yes", "on"} else []
        command = [str(self.root / ".venv/bin/uv"), *arguments, *no_index]
        return self.run(command, uv_variables(settings, os.environ))


def fingerprint(root: Path, version: tuple[int, ...]) -> str:
    """Say what an environment was made for, and hash what it was made from.

    With another first line it has to be made anew (its scripts name the folder they live in); with
    another second line it only needs installing into.
    """
    sources = [(root / name).read_bytes() for name in ("requirements.lock", "pyproject.toml")]
    digest = hashlib.sha256(b"".join(hashlib.sha256(source).digest() for source in sources))
    return f"Python {'.'.join(map(str, version))} in {root}\n{digest.hexdigest()}\n"


def read_pip_settings(listing: str) -> dict[str, str]:
    """Read what `pip config list` prints; what is said by variable wins over the files."""
    found = re.findall(
        r"""^(global|install|:env:)\.([\w-]+)=(['"].*['"])$""", listing, re.MULTILINE
    )
    rank = ("global", "install", ":env:").index
    ordered = sorted(found, key=lambda setting: rank(setting[0]))
    return {name: str(ast.literal_eval(value)) for _, name, value in ordered}


def uv_variables(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Translate pip's settings into uv's variables, except where uv was told otherwise."""
    # pip looks for the best version in all indexes, uv in the first that knows the name. The
    # hashes in the lock make pip's way safe.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in settings.items():
        if variable := UV_NAMES.get(name):
            variables[variable] = UV_SEPARATORS.get(variable, " ").join(value.split())
    return {name: value for name, value in variables.items() if name not in environment}


def refuse_old_python(version: tuple[int, ...]) -> None:
    if version < OLDEST_PYTHON:
        raise CannotBootstrap(
            f"Muster needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer and this is "
            f"{'.'.join(map(str, version))}: install one, or name it with `make PYTHON=...`"
        )


def refuse_without_ensurepip(version: tuple[int, ...]) -> None:
    if find_spec("ensurepip") is None:
        package = f"python{'.'.join(map(str, version))}-venv"
        raise CannotBootstrap(
            f"{sys.executable} cannot make virtual environments because ensurepip is missing: "
            f"on Debian and Ubuntu run `apt-get install {package}`, then the same command again"
        )


def explain(failure: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(failure, subprocess.CalledProcessError):
        return f"`{shlex.join(failure.cmd)}` ended with status {failure.returncode}"
    return str(failure)


def say(line: str) -> None:
    print(f"bootstrap: {line}", flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Announce a step, and how long it took once it is done."""
    say(f"{name} ...")
    started = time.monotonic()
    yield
    say(f"{name} took {time.monotonic() - started:.1f} s")


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other bootstrap works on this checkout, and keep others waiting."""
    # The lock is on a file that is always there, because .venv is emptied under it. Opened for
    # writing, as an exclusive lock over NFS demands.
    with (root / "requirements.lock").open("r+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another bootstrap of this checkout")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_in(root: Path) -> Run:
    def run(command: Sequence[str], variables: Mapping[str, str]) -> str:
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, cwd=root, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    return run


def main(arguments: Sequence[str]) -> int:
    root = Path(__file__).resolve().parent
    try:
        refuse_old_python(sys.version_info[:2])
        bootstrap = Bootstrap(root, run_in(root))
        if arguments[:1] == ["uv"]:
            print(bootstrap.uv(*arguments[1:]), end="")
        else:
            with alone(root):
                bootstrap.refresh()
    except (CannotBootstrap, OSError) as problem:
        say(str(problem))
        return 1
    except subprocess.CalledProcessError as failure:
        print(failure.stdout or "", end="")
        say(f"{explain(failure)}; mend what it printed and run the same command again")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command starts again from a clean .venv")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
