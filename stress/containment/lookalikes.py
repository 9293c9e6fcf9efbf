"""Processes that look like those of a job but must not be killed with it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import process_tag
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.containment import tag_numbers
from muster.host.processes import identify

LIMITED = "ulimit -x $0; exec sleep 600"


@contextmanager
def neighbours(uid: str) -> Iterator[list[ProcessRecord]]:
    """Start processes whose tags nearly match this job."""
    other = uid[:-1] + ("1" if uid[-1] == "0" else "0")
    of_job = tag_numbers(f"{uid}/")
    with _started(
        limits=[of_job.start - 1, of_job.stop, 4096],
        tags=[process_tag(other, 0, 0), f"{uid}0/0/0", f"0{uid}/0/0", "", uid[:-1]],
    ) as records:
        yield records


@contextmanager
def relatives(uid: str, rank: int, attempt: int) -> Iterator[list[ProcessRecord]]:
    """Start processes of other ranks, of the next attempt, and one with a copied environment.

    A person may copy the environment to reproduce a fault.
    """
    others = [(rank + 1, attempt), (rank + 10, attempt), (rank, attempt + 1)]
    with _started(
        limits=[tag_numbers(process_tag(uid, *other)).start for other in others],
        tags=[process_tag(uid, *other) for other in [*others, (rank, attempt)]],
    ) as records:
        yield records


@contextmanager
def _started(*, limits: list[int], tags: list[str]) -> Iterator[list[ProcessRecord]]:
    started = [
        *(subprocess.Popen(["/bin/bash", "-c", LIMITED, str(limit)]) for limit in limits),
        *(subprocess.Popen(["/bin/sleep", "600"], env={PROCESS_TAG: value}) for value in tags),
    ]
    try:
        yield [record for process in started if (record := identify(process.pid)) is not None]
    finally:
        for process in started:
            process.kill()
            process.wait()
