"""Whether a command can run at all, as far as a look at this machine tells: ranks run here, too.

It is a doubt and no refusal: what is missing now may be there when the job's turn comes.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path


def doubts(command: Sequence[str], working_dir: Path, search_path: str | None) -> Iterator[str]:
    """Yield why `command` will probably not run; `search_path` is as in PATH."""
    program, *arguments = command
    place = str(working_dir / program) if "/" in program else program
    if shutil.which(place, path=search_path) is None:
        yield f"command: {_why_not(program, working_dir)}"
    elif (script := _script(program, arguments)) and not (working_dir / script).is_file():
        yield f"command: there is no {script} in {working_dir}"


def _why_not(program: str, working_dir: Path) -> str:
    if "/" in program:
        is_there = (working_dir / program).is_file()
        return (
            f"{program} is not executable: chmod +x makes it so, or run it with python"
            if is_there
            else f"there is no {program} in {working_dir}"
        )
    if " " in program:
        return f"{program!r} is one word: leave out the quotes, or write sh -c before it"
    return f"{program} is not found in PATH"


def _script(program: str, arguments: Sequence[str]) -> str | None:
    """Return the script that a Python is to run; None if it runs something else, or is none."""
    if not Path(program).name.startswith("python") or not arguments:
        return None
    return arguments[0] if arguments[0].endswith(".py") else None
