"""``muster chaos``: one fault for a rank or a host of a job, or one every so often.

The agent of the rank's host sends the signal. Times of a recovery are those of the job's events,
less that of the event `fault_injected`, by the clock of the coordinator.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import dropwhile
from typing import TYPE_CHECKING, Final, NoReturn

import click
import msgspec

from cli.connection import connected, exact_job_argument
from cli.errors import WrongState
from cli.jobs.workers import verdict_of
from cli.output import plural, say, table
from muster.client.errors import Conflict, NotFound, Unreachable, WaitTimedOut
from muster.client.progress import Progress
from muster.contracts.errors import MusterError, printable
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.rank import ProcessState
from muster.contracts.views.history import EventView, Fault, StruckProcess
from muster.contracts.views.job import FINISHED, MemberView, SummaryView

if TYPE_CHECKING:
    from muster.client import Job

WAIT_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.2

CALM_SECONDS: Final = 10.0  # how long the job is watched before the faults
RECOVERY_SECONDS: Final = 10.0  # how long the last recovery is waited for

RECOVERY: Final = ("the end is seen", "the others take a step", "the replacement is ready")
MILLISECOND: Final = timedelta(milliseconds=1)

FAULTS: Final[Mapping[Fault, str]] = {
    "kill": "is killed (SIGKILL)",
    "stop": "is stopped (SIGSTOP) and is replaced after the job's heartbeat_timeout",
    "term": "is asked to end (SIGTERM); a script does if it checks run.should_stop",
}
"""What each does to a rank."""


@click.command()
@exact_job_argument
@click.option(
    "--fault",
    type=click.Choice([*FAULTS], case_sensitive=False),
    default="kill",
    help="What happens to the rank.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="RANK",
    help="Which rank. Default: 0; with --every, a random one each time.",
)
@click.option("--host", metavar="HOST", help="Kill all ranks of this host, and their agent.")
@click.option("--every", type=click.FloatRange(0.05, 3600), help="Seconds between two faults.")
@click.option("--for", "duration", type=click.FloatRange(1, 86400), help="Seconds with faults.")
def chaos(
    *,
    job: str,
    fault: Fault,
    rank: int | None,
    host: str | None,
    every: float | None,
    duration: float | None,
) -> None:
    """Kill one rank and watch the job recover.

    Or stop it, or ask it to end, or kill all of a host. Exit code 0 if the rank runs again or
    has nothing left to do, 1 if the job fails or neither happens within a minute, 6 if nothing
    runs.

    With --every or --for (defaults: 1 and 60) it strikes repeatedly, then shows the share
    of steps that is left, how long the recoveries took, and the audit. Ctrl-C ends that early.
    Exit code 1 if the job fails, or a sample was not read exactly once.
    """
    if host is not None and (rank is not None or fault != "kill"):
        raise click.UsageError("A host can only be killed: leave out --rank and --fault.")
    with connected() as client:
        found = client.named(job)
        if every is not None or duration is not None:
            strike_again_and_again(found, fault, rank, host, every or 1.0, duration or 60.0)
        newest = newest_event(found)
        rank = 0 if rank is None and host is None else rank
        struck = found.inject_fault(fault, rank=rank, host=host)
        for process in struck.processes:
            click.echo(f"rank {process.rank} of {found.id}, pid {process.pid}, {FAULTS[fault]}")
        try:
            for message in watch(found, struck.processes, newest):
                click.echo(printable(message))
            print_recoveries(found, struck.processes, newest)
        finally:
            click.echo(f"see all of it: muster events {found.id}")
        sys.exit(found.refresh().status == JobStatus.FAILED)


def newest_event(job: Job) -> int:
    """Return the id of a job's newest event."""
    return max((event.event_id or 0 for event in job.events(1)), default=0)


def watch(job: Job, struck: Sequence[StruckProcess], newest: int) -> Iterator[str]:
    """Yield the events after `newest`, and what becomes of each rank, until all run or are done.

    Raises `MusterError` after a minute, or if nothing was struck.
    """
    waiting = {process.rank: process.pid for process in struck}
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        # The summary first: the events then explain it.
        summary = job.summary()
        for event in job.events(after=newest):
            newest = event.event_id or newest
            yield event.message
            if event.kind == "fault_dropped":
                raise WrongState("nothing was struck: try again once the rank is replaced")
        workers = {worker.rank: worker for worker in summary.workers}
        for rank, pid in list(waiting.items()):
            now = workers.get(rank)
            if summary.status in TERMINAL:
                outcome = f"is not replaced: {job.id} is {summary.status}"
            elif now is None or now.process == FINISHED:
                outcome = "is not replaced: it is finished"
            elif now.process == ProcessState.LIVE and now.pid != pid:
                outcome = f"runs again, as pid {now.pid}"
            else:
                continue
            del waiting[rank]
            yield f"rank {rank} {outcome}"
        if not waiting:
            return
        time.sleep(POLL_SECONDS)
    what = f"has not been replaced within {WAIT_SECONDS:g} s"
    raise MusterError(f"rank {min(waiting)} {what}: see muster events {job.id}")


def recovery_of(
    strike: StruckProcess, events: Sequence[EventView], members: Sequence[MemberView]
) -> list[int | None]:
    """Return the milliseconds after a fault of what `RECOVERY` names; None: it did not happen.

    `members` are all workers of the job's pool. The step is the first of the group without this
    rank; None for a process that was no member of the group.
    """
    me = strike.rank, strike.attempt
    faults = (event for event in events if event.kind == "fault_injected")
    ats = (fault.at for fault in faults if (fault.rank, fault.attempt) == me)
    if (struck_at := next(ats, None)) is None:
        return [None] * len(RECOVERY)
    later = [event for event in events if event.at > struck_at]
    of_rank = [event for event in later if event.rank == strike.rank]
    struck = (event for event in of_rank if event.attempt == strike.attempt)
    ends = (event for event in struck if event.kind in {"rank_exited", "rank_killed"})
    ready = (event for event in of_rank if event.kind == "rank_ready")
    joined = (member for member in members if member.joined_step is not None)
    is_member = any((member.rank, member.attempt) == me for member in joined)
    # A step that is reported late may be one of the group before.
    since = dropwhile(lambda event: event.kind != "group_announced", later if is_member else ())
    steps = (event for event in since if event.kind == "step_taken")
    found = [next(ends, None), next(steps, None), next(ready, None)]
    return [round((event.at - struck_at) / MILLISECOND) if event else None for event in found]


def print_recoveries(job: Job, strikes: Sequence[StruckProcess], newest: int) -> None:
    """Print a table of the times after the strikes, from the events after `newest`."""
    with suppress(WaitTimedOut):
        job.wait(JobStatus.RUNNING, RECOVERY_SECONDS)
    events: list[EventView] = []
    while page := job.events(after=(events[-1].event_id if events else newest)):
        events += page
    members = job.workers().workers
    recoveries = [recovery_of(strike, events, members) for strike in strikes]
    rows: list[list[str | int | None]] = []
    for index, words in enumerate(RECOVERY):
        if known := sorted(ms for times in recoveries if (ms := times[index]) is not None):
            rows.append([words, *(known[int(part * (len(known) - 1))] for part in (0.5, 0.95, 1))])
    if not rows:
        click.echo("no recovery was seen: a stopped rank is replaced after heartbeat_timeout")
        return
    for line in table(("milliseconds after the fault", "p50", "p95", "worst"), rows):
        click.echo(line)


def strike_again_and_again(
    job: Job, fault: Fault, rank: int | None, host: str | None, every: float, duration: float
) -> NoReturn:
    """Watch the undisturbed job, strike every so often, print what it has cost, and exit."""
    if job.is_terminal or job.status in {JobStatus.QUEUED, JobStatus.PAUSED}:
        way = f"muster wait {job.id} --until RUNNING"
        raise WrongState(f"{job.id} is {job.status}: start this when it trains: {way}")
    say(f"{job.id} trains undisturbed for {CALM_SECONDS:g} s, then with faults; Ctrl-C ends this")
    newest = newest_event(job)
    progress = Progress(sys.stderr, time.monotonic)
    readings: list[tuple[float, int]] = []
    calm: list[tuple[float, int]] = []
    strikes: list[StruckProcess] = []
    count = 0
    strike_at = time.monotonic() + CALM_SECONDS
    end_at = strike_at + duration
    with suppress(KeyboardInterrupt):
        while (now := time.monotonic()) < end_at and not job.refresh().is_terminal:
            summary = job.summary()
            progress.draw(summary)
            at, step = _progress_of(summary)
            # Ranks that have just started have no step yet.
            readings.append((at, max(step, readings[-1][1] if readings else 0)))
            if now >= strike_at:
                calm = calm or readings[:]
                struck = {(strike.rank, strike.pid) for strike in strikes}
                ranks = [
                    worker.rank
                    for worker in summary.workers
                    if worker.process == ProcessState.LIVE
                    and rank in {None, worker.rank}
                    and (worker.rank, worker.pid) not in struck
                ]
                # It ended just now, or none is alive, or the service is away.
                with suppress(Conflict, NotFound, Unreachable, IndexError):
                    one = random.choice(ranks) if host is None else None  # noqa: S311  no secret
                    strikes += job.inject_fault(fault, rank=one, host=host).processes
                    count += 1
                strike_at += every
            time.sleep(max(0.0, min(POLL_SECONDS, strike_at - time.monotonic())))
    progress.close()
    if not strikes:
        raise WrongState(f"{job.id} is {job.status}: no rank was hit; run it while the job trains")
    before, after = _speed(calm), _speed([calm[-1], readings[-1]])
    share = f"{after / before:.2f}" if before else "unknown"
    click.echo(f"goodput {share}: {after:.1f} steps/s with faults, {before:.1f} before")
    click.echo(f"{plural(count, 'fault')} (SIG{fault.upper()})")
    print_recoveries(job, strikes, newest)
    sentence, code = verdict_of(job.refresh().view, msgspec.to_builtins(job.audit()))
    click.echo(sentence)
    sys.exit(code == 1 or job.status == JobStatus.FAILED)


def _progress_of(summary: SummaryView) -> tuple[float, int]:
    """Return the steps of the ranks' last heartbeats, and the monotonic time of those."""
    furthest = max(rank.step for rank in summary.workers)
    ages = (rank.last_heartbeat_age_seconds for rank in summary.workers if rank.step == furthest)
    return time.monotonic() - min(age or 0.0 for age in ages), summary.step


def _speed(readings: Sequence[tuple[float, int]]) -> float:
    """Return the steps per second from the first to the last reading."""
    (began, first), (ended, last) = readings[0], readings[-1]
    return (last - first) / max(ended - began, POLL_SECONDS)
