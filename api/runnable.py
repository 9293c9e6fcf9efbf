"""Whether a command can run at all, as far as a look at this machine tells: ranks run here, too.

It is a doubt and no refusal: what is missing now may be there when the job's turn comes.
"""

import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from muster.contracts.printable import spelt_out


def doubts(command: Sequence[str], working_dir: Path, search_path: str | None) -> Iterator[str]:
    """Yield why `command` will probably not run; `search_path` is as in PATH.

    Of a word of the command it is shown what can be printed: jobs keep what is said of them.
    """
    yield from map(spelt_out, _doubts(command, working_dir, search_path))


def _doubts(command: Sequence[str], working_dir: Path, search_path: str | None) -> Iterator[str]:
    program, *arguments = command
    place = str(working_dir / program) if "/" in program else program
    if not _is_found(place, search_path):
        yield f"command: {_why_not(program, working_dir)}"
    elif (script := _script(program, arguments)) and not _may_be(working_dir / script):
        yield f"command: there is no {script} in {working_dir}"


def _is_found(place: str, search_path: str | None) -> bool:
    try:
        _find(place, search_path)
    except FileNotFoundError:
        return False
    return True


@lru_cache(maxsize=256)
def _find(place: str, search_path: str | None) -> None:
    """Raise `FileNotFoundError` for what cannot be run, which is not remembered, as it may come.

    A search takes a dozen calls of the system, and a flood of submissions the same few programs:
    one that was found counts as found until 255 others have been. Who goes meanwhile is no harm,
    as all this is a doubt and the start of a rank tells.
    """
    if shutil.which(place, path=search_path) is None:
        raise FileNotFoundError(place)


def _why_not(program: str, working_dir: Path) -> str:
    if "/" in program:
        is_there = _may_be(working_dir / program)
        return (
            f"{program} is not executable: chmod +x makes it so, or run it with python"
            if is_there
            else f"there is no {program} in {working_dir}"
        )
    if " " in program:
        return f"{program!r} is one word: leave out the quotes, or write sh -c before it"
    if _may_be(working_dir / program):
        return f"{program} is not found in PATH: run it with python, or as ./{program}"
    return f"{program} is not found in PATH"


def _may_be(file: Path) -> bool:
    """Whether a file is there, or nobody can tell: a name too long, a place not ours to look at."""
    try:
        return file.is_file()
    except OSError:
        return True


def _script(program: str, arguments: Sequence[str]) -> str | None:
    """Return the script that a Python is to run; None if it runs something else, or is none."""
    if not Path(program).name.startswith("python") or not arguments:
        return None
    return arguments[0] if arguments[0].endswith(".py") else None
