"""The Python that runs a user's code: which one it is, and whether it can run a managed program."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.contracts.interpreter import muster_problem

ANSWER_SECONDS: Final = 10.0
"""Far beyond what an interpreter takes to start."""

_PATH: Final = "import sys; print(sys.executable)"
_VERSION: Final = "import muster; print(getattr(muster, '__version__', 'an older one'))"


def callers_python(environ: Mapping[str, str]) -> str:
    """Return the first `python` on PATH that runs, else the interpreter of this process."""
    found = shutil.which("python", path=environ.get("PATH"))
    if found is None or is_ours(found):
        return found or sys.executable
    # It may be a script that chooses one (pyenv), or that finds none.
    with suppress(OSError, subprocess.SubprocessError):
        return _ask(found, "-S", "-c", _PATH, environ=environ) or sys.executable
    return sys.executable


def interpreter_problem(python: str, environ: Mapping[str, str]) -> str | None:
    """Return why this interpreter cannot run a program of our version of Muster.

    None if it can, or is too slow to say. Raises OSError if it cannot be started.
    """
    if is_ours(python):
        return None
    try:
        return muster_problem(python, _ask(python, "-P", "-c", _VERSION, environ=environ))
    except subprocess.CalledProcessError:
        return muster_problem(python, None)
    except subprocess.TimeoutExpired:
        return None


def is_ours(python: str) -> bool:
    """Return whether this is the interpreter of this process, by any of its names."""
    own = Path(sys.executable)  # what `python` links to is the same in all environments
    return Path(python).parent == own.parent and Path(python).resolve() == own.resolve()


def _ask(python: str, *words: str, environ: Mapping[str, str]) -> str:
    return subprocess.check_output(  # noqa: S603  the user's own interpreter
        [python, *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=ANSWER_SECONDS,
    ).strip()
