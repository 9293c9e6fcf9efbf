"""What agents wrote down while there was no coordinator to tell."""

from dataclasses import replace

import msgspec

from muster.contracts.exit_record import ExitRecord
from muster.contracts.layout import JobFiles
from muster.contracts.rank import ProcessState
from store.records import Worker


def as_recorded(worker: Worker, files: JobFiles) -> Worker:
    """Return the row of a rank as it would be had somebody heard how its process ended.

    Unchanged if it was known to have ended, or if nobody has seen its end.
    """
    if worker.state == ProcessState.EXITED:
        return worker
    try:
        content = files.exit_record(worker.rank, worker.incarnation).read_bytes()
        record = msgspec.json.decode(content, type=ExitRecord)
    except (OSError, msgspec.MsgspecError):
        return worker
    return replace(
        worker,
        state=ProcessState.EXITED,
        process=None,
        exit_code=record.exit_code,
        exit_signal=record.signal,
        finished=record.exit_code == 0 and not record.stopping,
    )
