"""``muster chaos``: one fault for one rank of a job on this machine, or one every so often.

The pid comes from the API and is checked against /proc: a process without the tag of this job and
rank never gets a signal. Times of a recovery are those of the job's events, less that of the fault.
"""

from __future__ import annotations

import platform
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import click
import msgspec

from cli.connection import connected, exact_job_argument
from cli.errors import Misuse, WrongState
from cli.output import plural, say, table
from cli.workers import verdict_of
from muster.client.errors import WaitTimedOut
from muster.client.progress import Progress
from muster.contracts.errors import MusterError, printable
from muster.contracts.job import TERMINAL, JobStatus
from muster.contracts.rank import ProcessState
from muster.contracts.views import EventView, JobView, MemberView, SummaryView, WorkerView
from muster.host.containment import tag_of
from muster.host.processes import identify, send_signal

if TYPE_CHECKING:
    from muster.client import Job

WAIT_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.2

CALM_SECONDS: Final = 10.0  # how long the job is watched before the faults

RECOVERY_SECONDS: Final = 10.0  # how long the last recovery is waited for

RECOVERY: Final = ("the end is seen", "the others take a step", "the replacement is ready")
MILLISECOND: Final = timedelta(milliseconds=1)

FINISHED: Final = "finished"
"""The API's state of a rank that has nothing left to do."""


FAULTS: Final[Mapping[str, tuple[signal.Signals, str]]] = {
    "kill": (signal.SIGKILL, "was killed (SIGKILL)"),
    "stop": (
        signal.SIGSTOP,
        "was stopped (SIGSTOP) and is replaced after the job's heartbeat_timeout",
    ),
    "term": (
        signal.SIGTERM,
        "was asked to end (SIGTERM); a script does if it checks run.should_stop",
    ),
}
"""A signal, and what it does to a rank."""


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
@click.option("--every", type=click.FloatRange(0.05, 3600), help="Seconds between two faults.")
@click.option("--for", "duration", type=click.FloatRange(1, 86400), help="Seconds with faults.")
def chaos(
    *,
    job: str,
    fault: str,
    rank: int | None,
    every: float | None,
    duration: float | None,
) -> None:
    """Kill one rank and watch the job recover.

    Or stop it, or ask it to end. Exit code 0 if the rank runs again or has nothing left to
    do, 1 if the job fails or neither happens within a minute, 6 if nothing runs.

    With --every or --for (defaults: 1 and 60) it strikes repeatedly, then shows the share
    of steps that is left, how long the recoveries took, and the audit. Ctrl-C ends that early.
    Exit code 1 if the job fails, or a sample was not read exactly once.
    """
    number, effect = FAULTS[fault]
    with connected() as client:
        found = client.named(job)
        if every is not None or duration is not None:
            strike_again_and_again(found, number, rank, every or 1.0, duration or 60.0)
        newest = newest_event(found)
        struck = strike(found.view, found.summary().workers, rank or 0, number)
        click.echo(f"rank {struck.rank} of {found.id}, pid {struck.pid}, {effect}")
        try:
            for message in watch(found, struck, newest):
                click.echo(printable(message))
            print_recoveries(found, [struck], newest)
        finally:
            click.echo(f"see all of it: muster events {found.id}")
        sys.exit(found.refresh().status == JobStatus.FAILED)


class Strike(NamedTuple):
    """A fault that hit a process."""

    rank: int
    attempt: int
    pid: int
    at: datetime


def strike(
    job: JobView, workers: Sequence[WorkerView], rank: int, number: signal.Signals
) -> Strike:
    """Send a signal to the process of a rank; raises `MusterError` unless it provably is that.

    `workers` are those of the job's summary.
    """
    name = job.job_id
    worker = worker_of(job, workers, rank)
    if worker.pid is None:
        raise WrongState(
            f"rank {rank} of {name} has no process, its state is {worker.state}: wait until it "
            f"has one: muster show {name}"
        )
    if worker.node != platform.node():
        raise MusterError(f"rank {rank} of {name} runs on {worker.node}: use muster chaos there")
    process = identify(worker.pid)
    is_tagged = (tag_of(worker.pid) or "").startswith(f"{job.job_uid}/{rank}/")
    struck = Strike(rank, attempt_of(worker), worker.pid, datetime.now(UTC))
    # Sent only to the process that was identified before: the tag is of that, not of a successor.
    if process is None or not is_tagged or not send_signal(process, number):
        raise MusterError(
            f"pid {worker.pid} does not carry the tag of rank {rank} of {name}, so no process was "
            "signalled: try again once the rank is replaced"
        )
    return struck


def worker_of(job: JobView, workers: Sequence[WorkerView], rank: int) -> WorkerView:
    """Return a rank of a job that is not over; raises `WrongState` and `Misuse`."""
    if job.status in TERMINAL:
        raise WrongState(
            f"{job.job_id} is {job.status}: choose a running job: muster ps -s RUNNING"
        )
    worker = next((it for it in workers if it.rank == rank), None)
    if worker is None:
        ranks = f"0 to {len(workers) - 1}"
        raise Misuse(f"{job.job_id} has no rank {rank}: choose {ranks} with --rank")
    return worker


def attempt_of(worker: WorkerView) -> int:
    """Return which attempt of its rank this is, -1 if none was started."""
    return int(worker.worker_id.partition(".")[2] or -1)


def targets(
    workers: Sequence[WorkerView], rank: int | None
) -> tuple[list[WorkerView], dict[int, str | None]]:
    """Return the live ranks on this host, and the hosts of the others by rank.

    Of `rank` alone, or of all if that is None.
    """
    live = [it for it in workers if it.state == ProcessState.LIVE and rank in {None, it.rank}]
    here = [it for it in live if it.node == platform.node()]
    return here, {it.rank: it.node for it in live if it not in here}


def newest_event(job: Job) -> int:
    """Return the id of a job's newest event."""
    return max((it.event_id or 0 for it in job.events(1)), default=0)


def watch(job: Job, struck: Strike, newest: int) -> Iterator[str]:
    """Yield the events after `newest` until the rank runs again or is finished, then the outcome.

    Raises `MusterError` after a minute.
    """
    rank, until = struck.rank, time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        # The summary first: the events then explain it.
        summary = job.summary()
        for event in job.events(after=newest):
            newest = event.event_id or newest
            yield event.message
        now = next((it for it in summary.workers if it.rank == rank), None)
        if summary.status in TERMINAL:
            yield f"rank {rank} is not replaced: {job.id} is {summary.status}"
            return
        if now is None or now.state == FINISHED:
            yield f"rank {rank} is not replaced: it is finished"
            return
        if now.state == ProcessState.LIVE and now.pid != struck.pid:
            yield f"rank {rank} runs again, as pid {now.pid}"
            return
        time.sleep(POLL_SECONDS)
    raise MusterError(f"rank {rank} has not been replaced within {WAIT_SECONDS:g} s")


def recovery_of(
    strike: Strike, events: Sequence[EventView], members: Sequence[MemberView]
) -> list[int | None]:
    """Return the milliseconds after a strike of what `RECOVERY` names; None: it did not happen.

    `members` are all workers of the job's pool. The step is the first of the group without this
    rank; None for a process that was no member of the group.
    """
    later = [it for it in events if it.at > strike.at]
    of_rank = [it for it in later if it.rank == strike.rank]
    ends = (
        it
        for it in of_rank
        if it.kind in {"rank_exited", "rank_killed"} and it.attempt == strike.attempt
    )
    ready = (it for it in of_rank if it.kind == "rank_ready")
    # Every attempt is a new member.
    attempts = (it for it in members if it.rank == strike.rank)
    member = next(islice(attempts, strike.attempt, None), None)
    is_member = member is not None and member.joined_step is not None
    # A step that is reported late may be one of the group before.
    since = dropwhile(lambda it: it.kind != "group_announced", later if is_member else ())
    steps = (it for it in since if it.kind == "step_taken")
    found = [next(ends, None), next(steps, None), next(ready, None)]
    return [round((it.at - strike.at) / MILLISECOND) if it else None for it in found]


def print_recoveries(job: Job, strikes: Sequence[Strike], newest: int) -> None:
    """Print a table of the times after the strikes, from the events after `newest`."""
    with suppress(WaitTimedOut):
        job.wait(JobStatus.RUNNING, RECOVERY_SECONDS)
    events: list[EventView] = []
    while page := job.events(after=(events[-1].event_id if events else newest)):
        events += page
    members = job.workers().workers
    recoveries = [recovery_of(it, events, members) for it in strikes]
    rows: list[list[str | int | None]] = []
    for index, words in enumerate(RECOVERY):
        if known := sorted(ms for it in recoveries if (ms := it[index]) is not None):
            rows.append([words, *(known[int(it * (len(known) - 1))] for it in (0.5, 0.95, 1))])
    if not rows:
        click.echo("no recovery was seen: a stopped rank is replaced after heartbeat_timeout")
        return
    for line in table(("milliseconds after the fault", "p50", "p95", "worst"), rows):
        click.echo(line)


def strike_again_and_again(
    job: Job, number: signal.Signals, rank: int | None, every: float, duration: float
) -> NoReturn:
    """Watch the undisturbed job, strike every so often, print what it has cost, and exit."""
    worker_of(job.view, job.summary().workers, rank or 0)
    if job.view.status in {JobStatus.QUEUED, JobStatus.PAUSED}:
        raise WrongState(
            f"{job.id} is {job.view.status}: start this when it trains: "
            f"muster wait {job.id} --until RUNNING"
        )
    say(f"{job.id} trains undisturbed for {CALM_SECONDS:g} s, then with faults; Ctrl-C ends this")
    newest = newest_event(job)
    progress = Progress(sys.stderr, time.monotonic)
    looks: list[tuple[float, int]] = []
    calm: list[tuple[float, int]] = []
    strikes: list[Strike] = []
    elsewhere: dict[int, str | None] = {}
    strike_at = time.monotonic() + CALM_SECONDS
    end_at = strike_at + duration
    with suppress(KeyboardInterrupt):
        while (now := time.monotonic()) < end_at and not job.refresh().is_terminal:
            summary = job.summary()
            progress.draw(summary)
            at, step = _progress_of(summary)
            # Ranks that have just started have no step yet.
            looks.append((at, max(step, looks[-1][1] if looks else 0)))
            if now >= strike_at:
                calm = calm or looks[:]
                here, others = targets(summary.workers, rank)
                elsewhere |= others
                # A stopped rank is live until it is replaced.
                struck = {(it.rank, it.attempt) for it in strikes if number == signal.SIGSTOP}
                ranks = [it.rank for it in here if (it.rank, attempt_of(it)) not in struck]
                with suppress(MusterError, IndexError):  # it ended just now, or none is alive
                    one = random.choice(ranks)  # noqa: S311  no secret
                    strikes.append(strike(job.view, summary.workers, one, number))
                strike_at += every
            time.sleep(max(0.0, min(POLL_SECONDS, strike_at - time.monotonic())))
    progress.close()
    for other, node in sorted(elsewhere.items()):
        say(f"rank {other} runs on {node} and was not struck there: use muster chaos there")
    if not strikes:
        raise WrongState(f"{job.id} is {job.status}: no rank was hit; run it while the job trains")
    before, after = _speed(calm), _speed([calm[-1], looks[-1]])
    share = f"{after / before:.2f}" if before else "unknown"
    click.echo(f"goodput {share}: {after:.1f} steps/s with faults, {before:.1f} before")
    click.echo(f"{plural(len(strikes), 'fault')} ({number.name})")
    print_recoveries(job, strikes, newest)
    sentence, code = verdict_of(job.refresh().view, msgspec.to_builtins(job.audit()))
    click.echo(sentence)
    sys.exit(code == 1 or job.status == JobStatus.FAILED)


def _progress_of(summary: SummaryView) -> tuple[float, int]:
    """Return the steps of the ranks' last heartbeats, and the monotonic time of those."""
    furthest = max(it.step for it in summary.workers)
    ages = (it.last_heartbeat_age_seconds for it in summary.workers if it.step == furthest)
    return time.monotonic() - min(it or 0.0 for it in ages), summary.step


def _speed(looks: Sequence[tuple[float, int]]) -> float:
    """Return the steps per second from the first to the last look."""
    (began, first), (ended, last) = looks[0], looks[-1]
    return (last - first) / max(ended - began, POLL_SECONDS)
