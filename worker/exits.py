"""The durable record of how a process ended.

Who starts or adopts a process learns its exit code, once. The agent writes it down before it tells
anybody, so that a coordinator that was away finds out too.
"""

import os

import msgspec

from muster.checkpoints.durable import replace_file
from muster.checkpoints.filesystem import LocalFileSystem
from muster.contracts.exit_record import ExitRecord
from muster.contracts.layout import JobFiles


def write_exit_record(files: JobFiles, rank: int, incarnation: int, record: ExitRecord) -> None:
    """Make the record durable; it is never replaced, as an incarnation ends once."""
    if files.exit_record(rank, incarnation).exists():
        return
    path = str(files.exit_record(rank, incarnation))
    replace_file(LocalFileSystem(), f"{path}.{os.getpid()}.tmp", path, msgspec.json.encode(record))


def read_exit_record(files: JobFiles, rank: int, incarnation: int) -> ExitRecord | None:
    """Return what was written down; None if nothing was, or nothing that makes sense."""
    try:
        content = files.exit_record(rank, incarnation).read_bytes()
        return msgspec.json.decode(content, type=ExitRecord)
    except (OSError, msgspec.MsgspecError):
        return None
