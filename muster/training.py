"""Which of our own trainings a rank is to run, once it is known that it runs no command.

The process ends with it, and says of its end what an agent that is not there cannot say.
"""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from muster.contracts.environ import RankSettings
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.exit_records import exit_record, write_own_account
from muster.line import Line
from muster.log_end import last_lines
from muster.remarks import finish, remark
from muster.voice import Voice


def train(settings: RankSettings) -> NoReturn:
    """Train as the settings say, and end the process with it."""
    voice = Voice(Line.of(settings))
    code = 1
    try:
        code = _main(settings, voice)
    except BaseException as error:  # noqa: BLE001  nothing comes after it
        code = last_word(error)
    finally:
        _leave(code, settings, voice)


def _main(settings: RankSettings, voice: Voice) -> int:
    if settings.mode == "synchronous":
        from muster.synchronous.allocator import keep_freed_memory  # noqa: PLC0415  what is needed
        from muster.synchronous.rank import main as train_together  # noqa: PLC0415  what is needed

        keep_freed_memory()
        return train_together(settings, Path.cwd(), voice)
    from muster.classifier import main as train_alone  # noqa: PLC0415  what is needed

    return train_alone(settings, voice)


def last_word(error: BaseException) -> int:
    """Say of an error that ends the process what the interpreter would; return its exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        remark(f"{error.code}")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _leave(code: int, settings: RankSettings, voice: Voice) -> NoReturn:
    """End as the interpreter does, but wait for no thread that a program has left running."""
    atexit._run_exitfuncs()  # noqa: SLF001  os._exit leaves them out
    finish()
    with suppress(OSError):  # whoever sees the end needs no account of it
        _account_for(code, settings, voice)
    os._exit(code)


def _account_for(code: int, settings: RankSettings, voice: Voice) -> None:
    if settings.agent_socket is None:
        return
    files = JobFiles.around(settings.agent_socket)
    rank, incarnation = settings.rank, settings.restart_count
    exited = RankExited(
        rank=rank,
        incarnation=incarnation,
        exit_code=code & 0xFF,  # as the kernel has it
        signal=None,
        last_lines=() if code == 0 else _last_lines(files.log(rank, incarnation)),
    )
    said = (
        RankSaid(rank=rank, incarnation=incarnation, message=message) for message in voice.said()
    )
    write_own_account(files, exit_record(os.getpid(), said, exited))


def _last_lines(log: Path) -> tuple[str, ...]:
    with log.open("rb") as content:
        return last_lines(content.fileno())
