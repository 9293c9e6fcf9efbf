"""Processes that look like a job's and are not: whoever ends the job's must let them live."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from muster.brand import brands
from muster.contracts.environ import MARK, mark
from muster.contracts.process import ProcessRecord
from muster.processes import identify

LIMITED = "ulimit -x $0; exec sleep 600"


@contextmanager
def neighbours(uid: str) -> Iterator[list[ProcessRecord]]:
    """Start what is no process of this job, by a hair."""
    other = uid[:-1] + ("1" if uid[-1] == "0" else "0")
    of_job = brands(f"{uid}/")
    with _started(
        limits=[of_job.start - 1, of_job.stop, 4096],
        marks=[mark(other, 0, 0), f"{uid}0/0/0", f"0{uid}/0/0", "", uid[:-1]],
    ) as records:
        yield records


@contextmanager
def relatives(uid: str, rank: int, incarnation: int) -> Iterator[list[ProcessRecord]]:
    """Start what is no process of this incarnation: other ranks, its successor, a copyist.

    The copyist has its whole environment, as somebody has who looks for a fault by hand.
    """
    others = [(rank + 1, incarnation), (rank + 10, incarnation), (rank, incarnation + 1)]
    with _started(
        limits=[brands(mark(uid, *other)).start for other in others],
        marks=[mark(uid, *other) for other in [*others, (rank, incarnation)]],
    ) as records:
        yield records


@contextmanager
def _started(*, limits: list[int], marks: list[str]) -> Iterator[list[ProcessRecord]]:
    started = [
        *(subprocess.Popen(["/bin/bash", "-c", LIMITED, str(limit)]) for limit in limits),
        *(subprocess.Popen(["/bin/sleep", "600"], env={MARK: value}) for value in marks),
    ]
    try:
        yield [record for process in started if (record := identify(process.pid)) is not None]
    finally:
        for process in started:
            process.kill()
            process.wait()
