"""How a rank's process ended, on disk: the agent's exit record and the process's own.

The agent learns an exit code only once. It writes the exit record before it reaps the process or
reports the exit, so that a coordinator or agent that was away finds out later.

An agent may die or be suspended just when its ranks finish. A training process therefore writes a
record of its own as its last act. That counts only if no agent has seen the exit.
"""

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from muster.checkpoints.errors import StaleGeneration
from muster.checkpoints.local import DIRECTORY_MODE
from muster.contracts.job.retry import INTERRUPTED_CODE, REPLACED_CODE
from muster.contracts.messages.agent import RankExited, RankSaid
from muster.contracts.messages.wire import ExitRecord, decode_exit_record, encode
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.paths import JobFiles
from muster.host.files import replace_private
from muster.host.processes import is_running
from muster.logs.source import decode
from muster.runtime.agent_client import AgentClient
from muster.runtime.redaction import Redaction
from muster.runtime.stderr_messages import flush_streams, print_stderr

LAST_LINES: Final = 10
LAST_BYTES: Final = 8192
"""What a failure message quotes of a log: enough for the end of a traceback."""

TOO_LONG: Final = f"[the last line is longer than {LAST_BYTES} bytes: read it in the log]"


def make_exit_record(pid: int, said: Iterable[RankSaid], exited: RankExited) -> ExitRecord:
    """Return the record of an exit, with the current time."""
    return ExitRecord(pid=pid, at=datetime.now(UTC).isoformat(), said=tuple(said), exited=exited)


def write_exit_record(files: JobFiles, record: ExitRecord) -> None:
    """Write the agent's record, which survives the agent; an existing one is kept. Raises OSError.

    Not flushed: after a power cut no process is left, and an exit that is in no row starts again.
    """
    path = files.exit_record(record.exited.rank, record.exited.attempt)
    if not path.exists():
        path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        replace_private(path, encode(record))


def write_own_record(files: JobFiles, record: ExitRecord) -> None:
    """Write the process's own record; it survives the process, not the machine. Raises OSError."""
    path = files.exit_report(record.exited.rank, record.exited.attempt)
    path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(encode(record))


def read_exit_record(
    files: JobFiles, rank: int, attempt: int, process: ProcessRecord | None
) -> ExitRecord | None:
    """Return the agent's record of this process; None without a valid one."""
    return _read(files.exit_record(rank, attempt), None if process is None else process.pid)


def read_own_record(files: JobFiles, rank: int, attempt: int, pid: int) -> ExitRecord | None:
    """Return the process's own record; the process may have been killed after writing it."""
    return _read(files.exit_report(rank, attempt), pid)


def find_exit_record(
    files: JobFiles, rank: int, attempt: int, process: ProcessRecord | None
) -> ExitRecord | None:
    """Return the best record of an exit that no agent will report any more."""
    record = read_exit_record(files, rank, attempt, process)
    if record is not None or process is None or is_running(process):
        return record
    return read_own_record(files, rank, attempt, process.pid)


def _read(path: Path, pid: int | None) -> ExitRecord | None:
    try:
        return decode_exit_record(path.read_bytes(), pid)
    except OSError:
        return None


def last_lines(log: int) -> tuple[str, ...]:
    """Return the end of the log with this descriptor, bounded in lines and bytes.

    Whole lines only: half of a line may hold half of a secret, which redaction would miss.
    """
    size = os.fstat(log).st_size
    start = max(0, size - LAST_BYTES)
    raw = os.pread(log, LAST_BYTES, start)
    if start:  # what follows a carriage return is whole, too, such as the state of a progress bar
        raw = b"".join(raw.splitlines(keepends=True)[1:]) or TOO_LONG.encode()
    return tuple(decode(raw).splitlines()[-LAST_LINES:])


class ExitReport:
    """Writes the own record of a training process when it exits."""

    def __init__(self, settings: RankSettings, client: AgentClient) -> None:
        self.settings = settings
        self._client = client
        self._pid = os.getpid()

    def write(self, code: int) -> None:
        """Write it, unless this is a spare process or a fork of the program. Raises OSError."""
        agent_socket = self.settings.agent_socket
        if agent_socket is None or self.settings.is_spare or os.getpid() != self._pid:
            return
        rank, attempt = self.settings.rank, self.settings.restart_count
        files = JobFiles.of_agent_socket(agent_socket)
        redaction = Redaction.of_rank(os.environ)
        lines: tuple[str, ...] = ()
        if code != 0:
            with suppress(OSError), files.log(rank, attempt).open("rb") as log:
                lines = last_lines(log.fileno())
        exited = RankExited(
            rank=rank, attempt=attempt, exit_code=code, signal=None, last_lines=lines
        )
        said = (
            RankSaid(rank=rank, attempt=attempt, message=message)
            for message in self._client.state()
        )
        record = make_exit_record(self._pid, map(redaction.redact, said), redaction.redact(exited))
        write_own_record(files, record)


def print_error(error: BaseException) -> int:
    """Print an error that ends the process, as the interpreter would; return the exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    if isinstance(error, SystemExit):
        print_stderr(f"{error.code}")
    else:
        with suppress(SystemExit):  # of a replaced process
            sys.excepthook(type(error), error, error.__traceback__)
    return REPLACED_CODE if isinstance(error, StaleGeneration) else 1


def print_interrupt() -> int:
    """Print what Ctrl-C leaves of a rank that was started by hand; return the exit code."""
    print_stderr("muster: interrupted: saved checkpoints stay, the steps since then are lost")
    return INTERRUPTED_CODE


def exit_process(code: int, report: ExitReport | None = None) -> NoReturn:
    """Exit as the interpreter does, but without waiting for threads of the program."""
    code &= 0xFF  # as the kernel does
    try:
        atexit._run_exitfuncs()  # noqa: SLF001  os._exit skips them
        flush_streams()
        if report is not None:
            with suppress(Exception):  # the agent usually sees the exit itself
                report.write(code)
    finally:
        os._exit(code)
