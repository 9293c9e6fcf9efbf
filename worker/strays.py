"""What still runs of a job when an agent begins, and is nobody's.

An agent that was killed may have started a rank that nobody has heard of, left its template or half
a fork, or be only stopped itself. Whatever the new agent is not told to adopt, it ends before it
starts anything: no incarnation is ever there twice.
"""

import os
import signal
import sys
import time
from collections.abc import Collection
from typing import Final

from muster.contracts.process import ProcessRecord
from muster.processes import mark_of, marked, send_signal

STRAYS_SECONDS: Final = 2.0
STRAYS_PAUSE_SECONDS: Final = 0.01
"""What was killed needs a moment to be gone."""


def end_strays(job_uid: str, spared: Collection[str]) -> None:
    """Kill every process of the job but this one and those whose mark is `spared`."""
    deadline = time.monotonic() + STRAYS_SECONDS
    while strays := _strays(job_uid, spared):
        if time.monotonic() > deadline:
            print(f"{len(strays)} processes of the job survive SIGKILL", file=sys.stderr)
            return
        for record in strays:
            send_signal(record, signal.SIGKILL)
        time.sleep(STRAYS_PAUSE_SECONDS)


def _strays(job_uid: str, spared: Collection[str]) -> list[ProcessRecord]:
    return [
        record
        for record in marked(f"{job_uid}/")
        if record.pid != os.getpid()
        # Who has no mark to show started with none, or is gone: a rank's end ends it.
        and (mark := mark_of(record.pid)) is not None
        and mark not in spared
    ]
