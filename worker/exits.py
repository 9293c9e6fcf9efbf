"""The durable record of how a process ended.

Only its parent learns a process's exit code, once. The agent writes it down before it tells
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
    path = str(files.exit_record(rank, incarnation))
    replace_file(LocalFileSystem(), f"{path}.{os.getpid()}.tmp", path, msgspec.json.encode(record))
