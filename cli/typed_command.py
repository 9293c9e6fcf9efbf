"""A command as it was typed after ``--``: what a prompt would have run, and a rank cannot.

No shell reads it, and a directory's own files are not in PATH. The server could only say so of each
rank; whoever has just typed it is told what to type.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SIGNS_OF_A_SHELL: Final = frozenset("&|;<>$`*?(){}~")


def mistyped(command: Sequence[str], working_dir: Path) -> str | None:
    """Return why this is no command and what to type; None if it may be one."""
    program, *arguments = command
    if shutil.which(program):
        return None
    is_here = os.path.isfile(working_dir / program)  # noqa: PTH113  Path's fails at long lines
    if not arguments and " " in program and not is_here:
        return _of_a_line(program)
    if "/" in program or not is_here:
        return None
    found = f"{program} is in {working_dir} and not in PATH"
    if os.access(working_dir / program, os.X_OK):
        return f"{found}: write -- {shlex.join([f'./{program}', *arguments])}"
    if program.endswith(".py"):
        return f"{found}: write -- {shlex.join(['python', *command])}"
    return None


def _of_a_line(line: str) -> str:
    if SIGNS_OF_A_SHELL.isdisjoint(line):
        return f"{line!r} is one word: write -- {line}"
    return f"no shell reads {line!r}: write -- {shlex.join(['sh', '-c', line])}"
