"""The records of how a process ended: its agent's, and for want of that its own.

Who starts or adopts a process learns its exit code, once. The agent writes it down before it lets
go of the process or tells anybody, so that a coordinator, or a successor, finds out too.

An agent may be killed, or stand still, in the very moment in which its ranks are through. So a
process that runs a training of ours writes down, last of all, what it is about to exit with. That
counts only when it is gone and no agent has seen how.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from muster.checkpoints.durable import ensure_directory, replace_file
from muster.checkpoints.filesystem import DIRECTORY_MODE, FILE_MODE, LocalFileSystem
from muster.contracts.exit_record import ExitRecord, decode_exit_record, encode_exit_record
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.contracts.process import ProcessRecord
from muster.processes import is_running
from muster.strange_files import content_of

LIMIT_BYTES: Final = 64 << 20
"""More than all that a process may have said."""

_WRITING: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC


def record_of(pid: int, said: Iterable[RankSaid], exited: RankExited) -> ExitRecord:
    """Return the record of an end, with the time that it is now."""
    return ExitRecord(pid=pid, at=datetime.now(UTC).isoformat(), said=tuple(said), exited=exited)


def write_exit_record(files: JobFiles, record: ExitRecord) -> None:
    """Make an agent's record durable; it is never replaced, as an incarnation ends once."""
    path = files.exit_record(record.exited.rank, record.exited.incarnation)
    if not path.exists():
        disk = LocalFileSystem()
        ensure_directory(disk, str(path.parent))
        replace_file(disk, str(path), encode_exit_record(record))


def write_own_account(files: JobFiles, record: ExitRecord) -> None:
    """Write down one's own end. Raises OSError.

    It has to outlive this process and not the machine: nothing is flushed. Half of it is none.
    """
    path = files.own_account(record.exited.rank, record.exited.incarnation)
    path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    with open(os.open(path, _WRITING, FILE_MODE), "wb", buffering=0) as account:  # noqa: PTH123
        account.write(encode_exit_record(record))


def read_exit_record(
    files: JobFiles, rank: int, incarnation: int, process: ProcessRecord | None
) -> ExitRecord | None:
    """Return what an agent wrote down of this process; None if nothing that makes sense was."""
    content = content_of(files.exit_record(rank, incarnation), LIMIT_BYTES)
    record = decode_exit_record(content, None if process is None else process.pid)
    return record if record is not None and _is_of(record, rank, incarnation) else None


def read_own_account(files: JobFiles, rank: int, incarnation: int, pid: int) -> ExitRecord | None:
    """Return what the process wrote down itself; it may have been killed after that."""
    record = decode_exit_record(content_of(files.own_account(rank, incarnation), LIMIT_BYTES), pid)
    return record if record is not None and _is_of(record, rank, incarnation) else None


def _is_of(record: ExitRecord, rank: int, incarnation: int) -> bool:
    """Return whether it tells of this incarnation and no other."""
    told: tuple[RankExited | RankSaid, ...] = (record.exited, *record.said)
    return all((each.rank, each.incarnation) == (rank, incarnation) for each in told)


def known_end(
    files: JobFiles, rank: int, incarnation: int, process: ProcessRecord | None
) -> ExitRecord | None:
    """Return the best account there is of an end that no agent will tell of any more."""
    record = read_exit_record(files, rank, incarnation, process)
    if record is not None or process is None or is_running(process):
        return record
    return read_own_account(files, rank, incarnation, process.pid)
