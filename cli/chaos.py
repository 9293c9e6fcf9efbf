"""``muster chaos``: one fault for one rank of a job on this machine, to see the job recover.

The pid comes from the API and is checked against /proc: a process without the tag of this job and
rank never gets a signal.
"""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from cli.connection import connected, exact_job_argument
from cli.errors import Misuse, WrongState
from muster.client.progress import news
from muster.contracts.errors import MusterError, printable
from muster.contracts.job import TERMINAL
from muster.contracts.rank import ProcessRecord, ProcessState
from muster.contracts.views import EventView, JobView, WorkerView
from muster.host.containment import tag_of
from muster.host.processes import identify, send_signal

if TYPE_CHECKING:
    from muster.client import Job

WAIT_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.2
FINISHED: Final = "finished"
"""The API's state of a rank that has nothing left to do."""


class FaultKind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    TERM = "term"


class Fault(NamedTuple):
    signal: signal.Signals
    description: str
    why_still_running: str
    """Why the process may still run a minute later."""


_REPLACED: Final = "is replaced after the job's heartbeat_timeout"

FAULTS: Final = {
    FaultKind.KILL: Fault(signal.SIGKILL, "was killed (SIGKILL)", "the system cannot end it yet"),
    FaultKind.STOP: Fault(
        signal.SIGSTOP, f"was stopped (SIGSTOP) and {_REPLACED}", f"it is stopped, and {_REPLACED}"
    ),
    FaultKind.TERM: Fault(
        signal.SIGTERM,
        "was asked to end (SIGTERM)",
        "it trains on. A script ends if it checks run.should_stop; --fault kill always ends it",
    ),
}


@click.command()
@exact_job_argument
@click.option(
    "--fault",
    type=click.Choice(FaultKind, case_sensitive=False),
    default=FaultKind.KILL,
    help="What happens to the rank.",
)
@click.option("--rank", type=click.IntRange(min=0), default=0, metavar="RANK", help="Which rank.")
@click.option(
    "--wait/--no-wait", default=True, help="Show the next minute, until the rank runs again."
)
def chaos(*, job: str, fault: FaultKind, rank: int, wait: bool) -> None:
    """Kill one rank and watch the job recover.

    Or stop it, or ask it to end. Exit code 0 if the rank runs again or has nothing left to
    do, 1 if neither happens within a minute, 6 if nothing runs.
    """
    with connected() as client:
        found = client.named(job)
        workers = found.summary().workers
        record = process_of(found.view, workers, rank)
        worker = next(it for it in workers if it.rank == rank)
        events = found.events()
        if not send_signal(record, FAULTS[fault].signal):
            raise MusterError(f"rank {rank} of {found.id} ended by itself just now: try again")
        click.echo(f"rank {rank} of {found.id}, pid {record.pid}, {FAULTS[fault].description}")
        try:
            for message in watch(found, worker, events, FAULTS[fault]) if wait else ():
                click.echo(printable(message))
        finally:
            click.echo(f"see all of it: muster events {found.id}")


def process_of(job: JobView, workers: Sequence[WorkerView], rank: int) -> ProcessRecord:
    """Return the process of a rank; raises `MusterError` unless it provably is that.

    `workers` are those of the job's summary.
    """
    name = job.job_id
    if job.status in TERMINAL:
        raise WrongState(f"{name} is {job.status}: choose a running job: muster ps -s RUNNING")
    worker = next((it for it in workers if it.rank == rank), None)
    if worker is None:
        raise Misuse(f"{name} has no rank {rank}: choose 0 to {len(workers) - 1} with --rank")
    if worker.pid is None:
        raise WrongState(
            f"rank {rank} of {name} has no process, its state is {worker.state}: wait until it "
            f"has one: muster show {name}"
        )
    if worker.node != platform.node():
        raise MusterError(f"rank {rank} of {name} runs on {worker.node}: use muster chaos there")
    record = identify(worker.pid)
    is_tagged = (tag_of(worker.pid) or "").startswith(f"{job.job_uid}/{rank}/")
    # Identified before and after: then the tag is of this process, and not of a successor.
    if record is None or not is_tagged or identify(worker.pid) != record:
        raise MusterError(
            f"pid {worker.pid} does not carry the tag of rank {rank} of {name}, so no process was "
            "signalled: try again once the rank is replaced"
        )
    return record


def watch(job: Job, before: WorkerView, events: Sequence[EventView], fault: Fault) -> Iterator[str]:
    """Yield the events after a fault until the rank runs again or is finished, then the outcome.

    `before` and `events` are of the time before the fault. Raises `MusterError` after a minute.
    """
    rank, last, now = before.rank, events[-1] if events else None, before
    began = time.monotonic()
    while time.monotonic() - began < WAIT_SECONDS:
        # The summary first: the events then explain it.
        summary = job.summary()
        now = next((it for it in summary.workers if it.rank == rank), before)
        for event in news(job.events(), last):
            last = event
            yield event.message
        if now.worker_id != before.worker_id and now.state == ProcessState.LIVE:
            yield f"rank {rank} runs again, as pid {now.pid}"
            return
        if summary.status in TERMINAL or now.state == FINISHED:
            yield f"rank {rank} is not replaced: it is finished, or its job is over"
            return
        time.sleep(POLL_SECONDS)
    if (now.worker_id, now.pid) == (before.worker_id, before.pid):
        raise MusterError(f"rank {rank} (pid {now.pid}) has not ended: {fault.why_still_running}")
    raise MusterError(f"rank {rank} does not run again after {WAIT_SECONDS:g} s")
