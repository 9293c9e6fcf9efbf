"""``muster ps``, ``show``, ``top``, ``logs`` and ``events``: what jobs do and have done."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import compress
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cli.connection import attached, connected, job_argument, status_option
from cli.output import (
    NAME_WIDTH,
    RANK_COLOURS,
    ROUTINE_EVENTS,
    STATUS_COLOURS,
    Cell,
    Output,
    Tracebacks,
    cropped,
    facts,
    moment,
    output_option,
    painted,
    plural,
    seconds_of,
    shortened,
    show,
    table,
)
from muster.client import job_path
from muster.client.errors import Busy, ClientError, Unreachable
from muster.client.progress import duration
from muster.contracts.errors import printable
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.views.job import JobView, LeaderboardRow, SummaryList, SummaryView, WorkerView
from muster.runtime.stderr_messages import LastMessage, print_stderr

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, Group
    from rich.text import Text

    from muster import Client
    from muster.client import Job
    from muster.client.http import Query

HEADER: Final = ("job", "status", "ranks", "step", "loss", "steps/s", "ETA", "restarts", "age")

LEFT_OUT: Final = ("steps/s", "loss", "ETA")
"""What ``ps`` leaves out on a terminal that is too narrow, this one first."""

RUNS_WIDTH: Final = 64
"""Of a command in ``show``, so that its line fits 80 columns."""

_RANKS_HEADER: Final = ("rank", "process", "step", "loss", "pid", "node", "restarts", "saved")

JOBS_LIMIT: Final = 100
"""More than a terminal has lines; each of them costs the server time."""

NAME_WIDTH_MIN: Final = 8
NAME_WIDTH_MAX: Final = 28
"""A longer id is cut in its middle; generated ids fit. A narrow terminal goes down to the first."""

_FRAME_LINES: Final = 3  # the summary, the header and the footer

_ENDS: Final = frozenset(f"job_{status.lower()}" for status in TERMINAL)

QUEUED_SECONDS: Final = 0.5  # between two reads of a job that waits

LINES_LIMIT: Final = 10_000
"""The API returns no more lines at once."""


@click.command()
@status_option
@click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=20, help="Most jobs. Default: 20."
)
@click.option("-a", "--all", is_flag=True, hidden=True, expose_value=False, help="As without it.")
@output_option
def ps(status: Sequence[str], limit: int, output: Output) -> None:
    """List jobs, newest first."""
    with connected() as client:
        query: Query = {"status": status, "limit": limit}
        answer = client.connection.ask("GET", "/jobs/summaries", query=query)
    jobs = answer.read_as(SummaryList).jobs
    now = datetime.now(UTC)
    lines = _fitted([row(job, now) for job in jobs])
    colours = ["", *(_colour_of(job.status) for job in jobs)]
    show(output, answer.read_as(object), lines, [job.job_id for job in jobs], colours)
    if answer.total is not None and answer.total > len(jobs):
        older = plural(answer.total - len(jobs), "older job")
        click.echo(f"{older} not shown (--limit {min(answer.total, 1000)})", err=True)
    elif not jobs:
        click.echo("no jobs; submit one: muster submit --help", err=True)


def _fitted(rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Return the table, without some columns where a terminal is too narrow for all."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for count in range(len(LEFT_OUT) + 1):
        kept = [name not in LEFT_OUT[:count] for name in HEADER]
        cells = [tuple(compress(row, kept)) for row in rows]
        lines = list(table(tuple(compress(HEADER, kept)), cells))
        if max(map(len, lines)) <= width:
            break
    return lines


@click.command("show")
@job_argument
@output_option
def show_job(job: str, output: Output) -> None:
    """Show one job and each of its ranks."""
    with connected() as client:
        found = client.job(job)
        body = client.connection.get(job_path(found.id))
        summary = found.summary()
        warnings = [event.message for event in found.events() if event.kind == "warned"]
    show(output, body, _lines(found.view, summary, warnings[-1:]), [found.id])


def row(job: SummaryView, now: datetime) -> tuple[Cell, ...]:
    """Return the cells of a job under `HEADER`."""
    speed = job.throughput_steps_per_sec
    return (
        job.job_id,
        job.status,
        str(job.world_size) if job.status in TERMINAL else f"{job.living}/{job.world_size}",
        progress_of(job),
        loss_of(job),
        f"{speed:.1f}" if speed else None,
        None if job.eta_seconds is None else duration(job.eta_seconds),
        job.restarts,
        duration((now - job.created_at).total_seconds()),
    )


def kind_of(spec: Mapping[str, Any]) -> str:
    """Return how the ranks of a job belong together."""
    is_gang = spec.get("restart_scope") == "gang"
    return "one gang" if is_gang else str(spec.get("mode", "mode unknown"))


def what_runs(spec: Mapping[str, Any]) -> str:
    """Return the command of every rank, or the training program."""
    if spec.get("command"):
        return shlex.join(spec["command"])
    return spec.get("program") or "the classifier"


def progress_of(job: SummaryView | WorkerView | LeaderboardRow) -> str | None:
    """Return ``step/total``; None for a program that does not report steps."""
    if job.total_steps is None:
        return str(job.step) if job.step else None
    return f"{job.step}/{job.total_steps}"


def loss_of(job: SummaryView | WorkerView) -> str | None:
    """Return the loss with four decimals."""
    return None if job.loss is None else f"{job.loss:.4f}"


def _lines(job: JobView, summary: SummaryView, warnings: Sequence[str]) -> Iterator[str]:
    yield from facts([*_facts(job, summary), *(("warning", text) for text in warnings)])
    if summary.workers:
        yield ""
        # Each restart of a gang is one of every rank; a rank's own number is of those it caused.
        is_gang = job.spec.get("restart_scope") == "gang"
        rows = (
            _rank_row(worker, summary.restarts if is_gang else worker.restarts)
            for worker in summary.workers
        )
        yield from table(_RANKS_HEADER, rows)


def _facts(job: JobView, summary: SummaryView) -> Iterator[tuple[str, str | None]]:
    yield "job", job.job_id
    yield "name", job.name
    yield "status", f"{job.status} ({job.reason})" if job.reason else job.status
    yield "message", job.message
    yield "ranks", f"{job.world_size}, {kind_of(job.spec)}"
    yield "runs", shortened(" ".join(what_runs(job.spec).split()), RUNS_WIDTH)
    yield "python", job.spec.get("python")
    yield "working in", job.spec.get("working_dir")
    if saved_to := job.spec.get("checkpoint_dir"):
        yield "checkpoint in", f"{saved_to}/{job.job_id}"
    yield "step", progress_of(summary)
    yield "loss", loss_of(summary)
    speed = summary.throughput_steps_per_sec
    yield "speed", f"{speed:.1f} steps/s" if speed else None
    if ratio := summary.metrics.get("compression.ratio"):
        kind = job.spec.get("compression") or "of the script"
        kind = kind["kind"] if isinstance(kind, dict) else kind
        saved = f"sends {ratio:.2f} of the bytes" if ratio < 1 else "saves nothing"
        yield "compression", f"{kind}, {saved}"
    yield "ETA", None if summary.eta_seconds is None else duration(summary.eta_seconds)
    if summary.checkpoints_saved:
        saved = plural(summary.checkpoints_saved, "checkpoint")
        yield "saved", f"{saved}, newest at step {summary.last_checkpoint_step}"
    of_all = ", of all ranks together" if job.spec.get("restart_scope") == "gang" else ""
    yield "restarts", f"{summary.restarts}{of_all}"
    times = {"submitted": job.created_at, "started": job.started_at, "finished": job.finished_at}
    for name, at in times.items():
        yield name, None if at is None else f"{moment(at)} UTC"


def _rank_row(worker: WorkerView, restarts: int) -> tuple[Cell, ...]:
    return (
        worker.rank,
        worker.process,
        progress_of(worker),
        loss_of(worker),
        worker.pid,
        shortened(worker.node, NAME_WIDTH),
        restarts,
        worker.last_checkpoint_step,
    )


@click.command()
@status_option
@click.option(
    "-i", "--interval", type=click.FloatRange(0.2, 3600), default=1.0, help="Seconds per update."
)
@click.option("--once", is_flag=True, help="Print the table once, as without a terminal.")
def top(status: Sequence[str], interval: float, *, once: bool) -> None:
    """Watch all jobs live.

    Active jobs come first. q or Ctrl-C ends this and no job.
    """
    with connected() as client:
        jobs, total = _newest(client, status)
        if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            now = datetime.now(UTC)
            for line in table(HEADER, [row(job, now) for job in jobs]):
                click.echo(line)
            return
        with suppress(KeyboardInterrupt):
            _watch(client, status, interval, jobs, total)


def _newest(client: Client, statuses: Sequence[str]) -> tuple[list[SummaryView], int]:
    """Return the newest jobs, active ones first, and the number of all that match."""
    query: Query = {"status": statuses, "limit": JOBS_LIMIT}
    answer = client.connection.ask("GET", "/jobs/summaries", query=query)
    jobs = sorted(answer.read_as(SummaryList).jobs, key=lambda job: job.status in TERMINAL)
    return jobs, answer.total or len(jobs)


def _watch(
    client: Client,
    statuses: Sequence[str],
    interval_seconds: float,
    jobs: list[SummaryView],
    total: int,
) -> None:
    from rich.live import Live  # noqa: PLC0415  60 ms

    answered = time.monotonic()
    trouble = ""
    before = termios.tcgetattr(0)
    tty.setcbreak(0)  # keys arrive without Enter, and are not shown
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                drawn = screen(jobs, total, client.url, live.console.size, trouble)
                live.update(drawn, refresh=True)
                if select.select([0], [], [], interval_seconds)[0] and b"q" in os.read(0, 64):
                    return
                try:
                    jobs, total = _newest(client, statuses)
                    answered, trouble = time.monotonic(), ""
                except (Unreachable, Busy) as error:
                    trouble = f"as of {duration(time.monotonic() - answered)} ago: {error}"
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def screen(
    jobs: Sequence[SummaryView], total: int, url: str, size: ConsoleDimensions, trouble: str
) -> Group:
    """Return what to draw on a terminal of this size; `total` counts all jobs."""
    from rich.console import Group  # noqa: PLC0415  as above

    now = datetime.now(UTC)
    shown = jobs[: max(1, size.height - _FRAME_LINES)]
    counts = Counter(job.status.lower() for job in jobs)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = [row(job, now)[:-1] for job in shown]  # without the age, 80 columns are enough
    others = max(map(len, table(HEADER[1:-1], [cells[1:] for cells in rows])))
    name_width = min(NAME_WIDTH_MAX, max(NAME_WIDTH_MIN, size.width - others - len("  ")))
    header, *lines = table(
        HEADER[:-1], [(cropped(str(name), name_width), *rest) for name, *rest in rows]
    )
    more = f"{total - len(shown)} more: select with --status.  " if total > len(shown) else ""
    return Group(
        _line(f"{url}  {now:%H:%M:%S} UTC  {summary or 'no jobs'}"),
        _line(header, "bold"),
        *(_line(line, _colour_of(job.status)) for job, line in zip(shown, lines, strict=True)),
        _line(trouble or f"{more}q ends this and no job", "yellow" if trouble else "dim"),
    )


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text  # noqa: PLC0415  as above

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def parse_time(_: click.Context, __: click.Parameter, text: str | None) -> datetime | None:
    """Return the time ``10m`` ago, or what ISO 8601 text names, here without an offset."""
    if text is None:
        return None
    try:
        if (seconds := seconds_of(text)) is not None:
            return datetime.now(UTC) - timedelta(seconds=seconds)
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        message = f"{text!r} is not a time such as 10m, 2h or 2026-03-01T12:00"
        raise click.BadParameter(message) from None


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Also print new lines until the job ends.")
@click.option("--rank", type=click.IntRange(min=0), help="Only the lines of this rank.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, LINES_LIMIT),
    help="Print only the last lines. Default: 200, with -f all, with --since 10000.",
)
@click.option(
    "--since", metavar="TIME", callback=parse_time, help="Only newer lines: 10m, 2h, or a time."
)
@click.option("--grep", metavar="TEXT", help="Only lines that contain this text.")
@click.option(
    "-o", "--output", type=click.Choice(["json"]), help="json: one object per line. Default: text."
)
def logs(
    job: str,
    *,
    follow: bool,
    rank: int | None,
    tail: int | None,
    since: datetime | None,
    grep: str | None,
    output: str | None,
) -> None:
    """Show what the ranks of a job have printed.

    Without -f, --tail counts the lines that --grep selects. With -f, it counts
    lines before --grep looks at them, which then sees the first 16 KiB of a line.
    """
    if follow and since is not None:
        raise click.UsageError("--since cannot be used with -f: followed lines have no times")
    if since is not None and tail is None:
        tail = LINES_LIMIT
    with attached(job) as found:
        if follow and found.status == JobStatus.QUEUED:
            why = f": {found.view.message}" if found.view.reason and found.view.message else ""
            click.echo(printable(f"{found.id} is {found.status}{why}"), err=True)
        for line in found.logs(rank, tail, since=since, grep=grep, follow=follow):
            if output:
                click.echo(msgspec.json.encode(line).decode())
            else:
                click.echo(line.line if rank is not None else with_rank(line.rank, line.line))


def with_rank(rank: int, line: str) -> str:
    """Return a line after its rank, which has a colour of its own on a terminal."""
    colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
    return f"{painted(f'[rank {rank}]', colour)} {line}"


def show_logs_and_events(job: Job, tracebacks: Tracebacks) -> None:
    """Print what the ranks print, and on standard error what happens to them, until the end."""
    events = Thread(target=_print_events, args=[job], daemon=True)
    events.start()
    for line in job.logs(follow=True):
        for text in tracebacks.pass_on(line.rank, line.line):
            click.echo(with_rank(line.rank, text))
    for rank, text in tracebacks.rest():
        click.echo(with_rank(rank, text))
    events.join()
    job.wait()


def _print_events(job: Job) -> None:
    reason = LastMessage()
    # The logs report what the API refuses. A client that Ctrl-C closes raises a RuntimeError.
    with suppress(ClientError, RuntimeError):
        while job.refresh().status == JobStatus.QUEUED:
            if job.view.reason and reason.is_new(job.view.message):
                print_stderr(printable(f"muster: {job.id} is QUEUED: {job.view.message}"))
            time.sleep(QUEUED_SECONDS)
        for event in job.follow_events():
            if event.kind not in ROUTINE_EVENTS and event.kind not in _ENDS:
                print_stderr(printable(f"muster: {event.message}"))


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Also print new events until the job ends.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=1000, help="Most events to show."
)
@output_option
def events(job: str, *, follow: bool, limit: int, output: Output) -> None:
    """Show what happened to a job, and why."""
    if follow:
        if output is not Output.TABLE:
            raise click.UsageError("-o cannot be used with -f: followed events are sentences")
        with attached(job) as found:
            for event in found.follow_events(limit):
                line = printable(f"{moment(event.at)}  {event.message}")
                click.echo(painted(line, _colour_of(event.kind)))
        return
    with connected() as client:
        body = client.connection.get(job_path(client.job(job).id, "events"), {"limit": limit})
    lines = (f"{moment(event['at'])}  {event['message']}" for event in body["events"])
    kinds = [event["kind"] for event in body["events"]]
    show(output, body, lines, kinds, map(_colour_of, kinds))
    if len(kinds) == limit:
        click.echo(f"there may be older events than these {limit}", err=True)


def _colour_of(status: str) -> str:
    """Return the colour of a status or of the event that reports it; other events have none."""
    return STATUS_COLOURS.get(status.removeprefix("job_").upper(), "")
