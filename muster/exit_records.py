"""The durable record of how a process ended.

Who starts or adopts a process learns its exit code, once. The agent writes it down before it lets
go of the process or tells anybody, so that a coordinator, or a successor, finds out too.
"""

from muster.checkpoints.durable import ensure_directory, replace_file
from muster.checkpoints.filesystem import LocalFileSystem
from muster.contracts.exit_record import ExitRecord, decode_exit_record, encode_exit_record
from muster.contracts.layout import JobFiles
from muster.contracts.process import ProcessRecord


def write_exit_record(files: JobFiles, record: ExitRecord) -> None:
    """Make the record durable; it is never replaced, as an incarnation ends once."""
    path = files.exit_record(record.exited.rank, record.exited.incarnation)
    if not path.exists():
        disk = LocalFileSystem()
        ensure_directory(disk, str(path.parent))
        replace_file(disk, str(path), encode_exit_record(record))


def read_exit_record(
    files: JobFiles, rank: int, incarnation: int, process: ProcessRecord | None
) -> ExitRecord | None:
    """Return what was written down of this process; None if nothing that makes sense was."""
    try:
        content = files.exit_record(rank, incarnation).read_bytes()
    except OSError:
        return None
    return decode_exit_record(content, None if process is None else process.pid)
