"""How a process that runs a training of ours leaves, and what it says of that.

An agent sees how its children end. One that is killed, or stands still, just then does not: so the
last thing that a process does is to write down what it is about to exit with.
"""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from muster.contracts.endings import INTERRUPTED_CODE
from muster.contracts.environ import RankSettings
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.exit_records import record_of, write_own_account
from muster.log_end import last_lines
from muster.redaction import Redaction
from muster.remarks import finish, remark
from muster.voice import Voice


class Account:
    """What a process has to say of its end, to whoever looks for it later."""

    def __init__(self, settings: RankSettings, voice: Voice) -> None:
        self._settings = settings
        self._voice = voice
        self._pid = os.getpid()

    def give(self, code: int) -> None:
        """Write it down, unless this is a fork of the program's that ran off its end."""
        socket = self._settings.agent_socket
        if socket is None or os.getpid() != self._pid:
            return
        rank, incarnation = self._settings.rank, self._settings.restart_count
        files = JobFiles.of_agent_socket(socket)
        redaction = Redaction.of_rank(os.environ)
        exited = RankExited(
            rank=rank,
            incarnation=incarnation,
            exit_code=code,
            signal=None,
            last_lines=() if code == 0 else _last_lines(files.log(rank, incarnation)),
        )
        said = (
            RankSaid(rank=rank, incarnation=incarnation, message=message)
            for message in self._voice.said()
        )
        account = record_of(self._pid, map(redaction.of, said), redaction.of(exited))
        write_own_account(files, account)


def last_word(error: BaseException) -> int:
    """Say of an error that ends the process what the interpreter would; return its exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        remark(f"{error.code}")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def interrupted() -> int:
    """Say of a rank that a person has started and ended by Ctrl-C what is left of it."""
    remark("muster: interrupted: what it has saved stays, and the steps since then are lost")
    return INTERRUPTED_CODE


def leave(code: int, account: Account | None = None) -> NoReturn:
    """End as the interpreter does, but wait for no thread that a program has left running."""
    code &= 0xFF  # as the kernel has it
    try:
        atexit._run_exitfuncs()  # noqa: SLF001  os._exit leaves them out
        finish()
        if account is not None:
            with suppress(Exception):  # whoever sees the end needs no account of it
                account.give(code)
    finally:
        os._exit(code)


def _last_lines(log: Path) -> tuple[str, ...]:
    try:
        with log.open("rb") as content:
            return last_lines(content.fileno())
    except OSError:
        return ()
