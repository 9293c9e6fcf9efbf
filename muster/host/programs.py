"""What runs a user's code: whether a command can be started, and by which Python."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import ETIMEDOUT
from functools import lru_cache
from os import X_OK, access, pathsep
from pathlib import Path
from shlex import join, quote
from typing import Final

from muster.contracts.errors import printable
from muster.contracts.interpreter import version_problem
from muster.contracts.job.field_types import PYTHON_NAMES
from muster.host.code import SHELLS

ANSWER_SECONDS: Final = 3.0
"""Far beyond what an interpreter takes to start. An agent waits for it, and must not be silent for
ten seconds."""

_PATH: Final = "import sys; print(sys.executable)"
_CODE_OPTION: Final = re.compile("-[A-Za-z]*[cm]")

_VERSION: Final = (
    "import muster, sys; its = sys.modules.get('muster.contracts.interpreter'); "
    "print(getattr(its, 'VERSION', ''), getattr(its, 'PROTOCOL', 0))"
)


def command_problem(
    command: Sequence[str], working_dir: Path, search_path: str | None
) -> str | None:
    """Return why `command` cannot run in `working_dir`, and what to write instead.

    Looks for the program in `search_path` (as in PATH), and for the script of a Python. What may
    not be looked at counts as being there.
    """
    program, *arguments = command
    place = str(working_dir / program) if "/" in program else program
    try:
        _find_program(place, search_path)
    except FileNotFoundError:
        return printable(_problem_of_missing(command, working_dir))
    except _NotRunnable as error:
        return printable(f"{program} {error}")
    name = Path(program).name
    if name.startswith("python") or name in SHELLS:
        # What follows -m or -c, alone or in a word such as -lc, belongs to the module or the code.
        words = (arg for arg in arguments if _CODE_OPTION.fullmatch(arg) or not arg.startswith("-"))
        script = next(words, "")
        if script.endswith((".py", ".sh")) and not _may_be_file(working_dir / script):
            return printable(f"there is no {script} in {working_dir}")
    return None


def with_interpreter(
    command: Sequence[str], python: str | None, job_env: Mapping[str, str]
) -> list[str]:
    """Return a command with an interpreter in place of `python`: ours if the job names none.

    The PATH of a host may have another one, or none of that name. A job that sets its own PATH
    chooses by it.
    """
    is_meant = command[0] in PYTHON_NAMES and (python is not None or "PATH" not in job_env)
    return [python or sys.executable, *command[1:]] if is_meant else list(command)


def path_with(python: str | None, path: str | None) -> str | None:
    """Return a PATH where shells and scripts find this interpreter, and what is beside it."""
    if python is None or (path and shutil.which("python", path=path) == python):
        return path
    return pathsep.join(filter(None, [str(Path(python).parent), path]))


class _NotRunnable(Exception):
    """A sentence about a script that the kernel cannot run, without its name."""


@lru_cache(maxsize=256)
def _find_program(place: str, search_path: str | None) -> None:
    """Raise `FileNotFoundError` unless there is such a program; only success is cached.

    Raises `_NotRunnable` for a script that the kernel cannot run. The search takes a dozen system
    calls, after each of which a busy service waits for the GIL.
    """
    if (found := shutil.which(place, path=search_path)) is None:
        raise FileNotFoundError(place)
    with suppress(OSError), Path(found).open("rb") as file:
        line = file.readline(256)
        if line[:2] == b"#!" and line.endswith(b"\r\n"):
            raise _NotRunnable(f"has Windows line ends: run sed -i 's/\\r$//' {quote(found)}")
        if line and line[:2] != b"#!" and b"\0" not in line:
            raise _NotRunnable("has no first line such as #!/bin/sh: add one")


def _problem_of_missing(command: Sequence[str], working_dir: Path) -> str:
    program = command[0]
    path = working_dir / program
    is_there = _may_be_file(path)
    runner = "bash" if program.endswith(".sh") else "python"
    if "/" in program:
        if is_there:
            return f"{program} is not executable: run chmod +x on it, or run it with {runner}"
        return f"there is no {program} in {working_dir}"
    if " " in program and not is_there:
        return (
            f"{program!r} is one word: leave out the quotes, or write {join(['sh', '-c', program])}"
        )
    if not is_there:
        return f"{program} is not found in PATH"
    instead = [f"./{program}", *command[1:]] if access(path, X_OK) else [runner, *command]
    return f"{program} is in {working_dir} but not in PATH: write {join(instead)}"


def _may_be_file(path: Path) -> bool:
    """True if a file is there, or if that cannot be determined."""
    try:
        return path.is_file()
    except OSError:
        return True


def callers_python(environ: Mapping[str, str]) -> str:
    """Return the first `python` on PATH that runs, else the interpreter of this process."""
    found = shutil.which("python", path=environ.get("PATH"))
    if found is None or _is_this_interpreter(found):
        return found or sys.executable
    # It may be a script that chooses one (pyenv), or that finds none.
    with suppress(OSError, subprocess.SubprocessError):
        chosen = _output_of(found, "-S", "-c", _PATH, environ=environ)
        return chosen if Path(chosen).is_file() else sys.executable
    return sys.executable


def interpreter_problem(python: str, environ: Mapping[str, str]) -> str | None:
    """Return why this interpreter cannot run a program of our version of Muster.

    None if it can. Raises OSError if it cannot be started, or is too slow to say.
    """
    if _is_this_interpreter(python):
        return None
    try:
        said = _output_of(python, "-P", "-c", _VERSION, environ=environ)
        version, _, protocol = said.rpartition(" ")
        return version_problem(python, version, int(protocol) if protocol.isdigit() else 0)
    except subprocess.CalledProcessError:
        return version_problem(python, None)
    except subprocess.TimeoutExpired as error:
        message = f"it has not told its version of Muster within {ANSWER_SECONDS:g} s"
        raise TimeoutError(ETIMEDOUT, message, python) from error


def _is_this_interpreter(python: str) -> bool:
    """Return whether this is the interpreter of this process, by any of its names."""
    own = Path(sys.executable)  # what `python` links to is the same in all environments
    return Path(python).parent == own.parent and Path(python).resolve() == own.resolve()


def _output_of(python: str, *words: str, environ: Mapping[str, str]) -> str:
    """Return the last line that an interpreter prints: a script around it may print others."""
    output = subprocess.check_output(  # noqa: S603  the user's own interpreter
        [python, *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=ANSWER_SECONDS,
    )
    return output.strip().rpartition("\n")[2]
