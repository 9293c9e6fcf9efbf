"""``muster chaos``: one fault for one rank of one's own job, to see what becomes of it.

The API says which process it is; that it is this one, /proc says here and now. What does not carry
the job's own mark is never signalled, whatever pid it has.
"""

import platform
import signal
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.aftermath import Aftermath
from cli.connected import NamedJob, connected
from cli.misuse import Misuse
from cli.untimely import Untimely
from muster.contracts.errors import MusterError
from muster.contracts.job import TERMINAL
from muster.contracts.printable import spelt_out
from muster.contracts.process import ProcessRecord
from muster.processes import identify, mark_of, send_signal

if TYPE_CHECKING:
    from muster.client.views import JobView, WorkerView


class FaultKind(StrEnum):
    """What can be done to a rank."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"


_SIGNALS: Final = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.STOP: signal.SIGSTOP,
    FaultKind.TERM: signal.SIGTERM,
}
_DONE: Final = {
    FaultKind.KILL: "was killed (SIGKILL)",
    FaultKind.STOP: "stands still (SIGSTOP): it is replaced after the job's heartbeat_timeout",
    FaultKind.TERM: "was asked to end (SIGTERM)",
}


_LINGERS: Final = {
    FaultKind.KILL: "the system cannot end it yet, perhaps because it waits for a disk",
    FaultKind.STOP: "it stands still, and is replaced after the job's heartbeat_timeout",
    FaultKind.TERM: (
        "it trains on. A script ends on SIGTERM if it looks at run.should_stop; --fault kill does "
        "not ask"
    ),
}
"""Why a process may be there a minute later."""


class FaultRefused(MusterError):
    """Nothing was signalled."""


class NoSuchRank(FaultRefused, Misuse):
    """The job has not so many."""


class NothingRuns(FaultRefused, Untimely):
    """The job is over, or its rank between two processes."""


def fault_named(word: str) -> FaultKind:
    """Return the fault of that name, or raise what Typer shows in our words and not in its own."""
    try:
        return FaultKind(word)
    except ValueError:
        raise typer.BadParameter(f"{word!r} is none of {', '.join(FaultKind)}") from None


Fault = Annotated[
    FaultKind,
    typer.Option(
        "--fault",
        help="What happens to the rank.",
        parser=fault_named,
        metavar=f"[{'|'.join(FaultKind)}]",
    ),
]
Rank = Annotated[int, typer.Option("--rank", min=0, help="Which rank.", metavar="RANK")]


Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait", help="Show what happens until the rank lives again, at most a minute."
    ),
]


def chaos(
    job: NamedJob, fault: Fault = FaultKind.KILL, rank: Rank = 0, *, wait: Wait = True
) -> None:
    """Kill, stop or end one rank of a job that runs on this machine, and see it recover.

    Exit code 0 if the rank lives again or has nothing left to do, 1 if it does
    neither within a minute: it may not have ended at all. 6 if nothing runs.
    """
    with connected() as client:
        found = client.named(job)
        workers = found.summary().workers
        record = process_of(found.view, workers, rank)
        worker = next(it for it in workers if it.rank == rank)
        aftermath = Aftermath(found, worker, _LINGERS[fault])
        if not send_signal(record, _SIGNALS[fault]):
            raise FaultRefused(f"rank {rank} of {found.id} ended by itself just now: try again")
        typer.echo(f"rank {rank} of {found.id}, pid {record.pid}, {_DONE[fault]}")
        try:
            for sentence in aftermath.sentences() if wait else ():
                typer.echo(spelt_out(sentence))
        finally:
            typer.echo(f"see all of it: muster events {found.id}")


def process_of(job: "JobView", workers: Sequence["WorkerView"], rank: int) -> ProcessRecord:
    """Return the process of a rank; raises `FaultRefused` unless it is certain whose it is.

    `workers` are the ranks of the job's summary.
    """
    name = job.job_id
    if job.status in TERMINAL:
        raise NothingRuns(f"{name} is {job.status}: choose a job that runs: muster ps -s RUNNING")
    worker = next((it for it in workers if it.rank == rank), None)
    if worker is None:
        last = len(workers) - 1
        there = f"the ranks 0 to {last}" if last else "rank 0 only"
        raise NoSuchRank(f"{name} has no rank {rank}: it has {there}, choose with --rank")
    pid, node = worker.pid, worker.node
    if pid is None:
        raise NothingRuns(
            f"rank {rank} of {name} has no process, its state is {worker.state}: wait until "
            f"it has one, see muster show {name}"
        )
    if node != platform.node():
        raise FaultRefused(f"rank {rank} of {name} runs on {node}: use muster chaos there")
    record = _proven(pid, f"{job.job_uid}/{rank}/")
    if record is None:
        raise FaultRefused(
            f"pid {pid} does not carry the mark of rank {rank} of {name}: it has ended, or its "
            "command has cleared its environment. Nothing was signalled: if it has ended, "
            "try again once it is replaced"
        )
    return record


def _proven(pid: int, mark: str) -> ProcessRecord | None:
    """Return who has `pid`, if its mark begins with `mark`."""
    record = identify(pid)
    is_ours = (mark_of(pid) or "").startswith(mark)
    # Looked at before and after: the mark is then this process's, and no successor's.
    return record if is_ours and identify(pid) == record else None
