"""Which of our own trainings a rank is to run, once it is known that it runs no command."""

import atexit
import os
import sys
from pathlib import Path
from typing import NoReturn

from muster.contracts.environ import RankSettings
from muster.remarks import finish, remark


def main(settings: RankSettings) -> int:
    """Train as the settings say; return the exit code."""
    if settings.mode == "synchronous":
        from muster.synchronous.allocator import keep_freed_memory  # noqa: PLC0415  what is needed
        from muster.synchronous.rank import main as train_together  # noqa: PLC0415  what is needed

        keep_freed_memory()
        return train_together(settings, Path.cwd())
    from muster.classifier import main as train_alone  # noqa: PLC0415  what is needed

    return train_alone(settings)


def last_word(error: BaseException) -> int:
    """Say of an error that ends the process what the interpreter would; return its exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        remark(f"{error.code}")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def end_process(code: int) -> NoReturn:
    """End as the interpreter does, but wait for no thread that a program has left running."""
    atexit._run_exitfuncs()  # noqa: SLF001  os._exit leaves them out
    finish()
    os._exit(code)
