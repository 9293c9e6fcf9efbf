"""The durable record of how a process ended.

Only its parent learns a process's exit code, once. The agent writes it down before it tells
anybody, so that a coordinator that was away finds out too.
"""

import os

import msgspec

from muster.checkpoints.durable import replace_file
from muster.checkpoints.filesystem import LocalFileSystem
from muster.contracts.layout import JobFiles


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `exit_code` and `signal` is set."""

    pid: int
    exit_code: int | None
    signal: int | None
    at: str
    """RFC 3339, UTC."""


def write_exit_record(files: JobFiles, rank: int, incarnation: int, record: ExitRecord) -> None:
    """Make the record durable; it is never replaced, as an incarnation ends once."""
    path = str(files.exit_record(rank, incarnation))
    replace_file(LocalFileSystem(), f"{path}.{os.getpid()}.tmp", path, msgspec.json.encode(record))
