"""``muster ps`` and ``show``: which jobs there are, and how one of them is."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.connected import Job, Statuses, connected
from cli.job_rows import fitting, progress_of, row, what_runs
from cli.output import Output, OutputOption, show
from cli.tables import NAME_WIDTH, Cell, shortened, table
from cli.times import shown
from muster.client.paths import path_of

if TYPE_CHECKING:
    from muster.client.views import JobView, SummaryView, WorkerView

_RANKS_HEADER: Final = ("rank", "state", "step", "loss", "pid", "node", "restarts", "saved")

RUNS_WIDTH: Final = 64
"""Of a command, so that its line fits 80 columns; `-o json` has all of it."""

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Most jobs to show.")]


def ps(status: Statuses = None, limit: Limit = 20, output: OutputOption = Output.TABLE) -> None:
    """List jobs, the newest first."""
    from muster.client.views import SummaryList  # noqa: PLC0415  --help

    with connected() as client:
        answer = client.connection.ask(
            "GET", "/jobs/summaries", query={"status": status or [], "limit": limit}
        )
    jobs = answer.read_as(SummaryList).jobs
    now = datetime.now(UTC)
    lines = table(*fitting([row(job, now) for job in jobs]))
    show(output, answer.read_as(object), lines, [job.job_id for job in jobs])
    if answer.total is not None and answer.total > len(jobs):
        typer.echo(f"{answer.total - len(jobs)} more: --limit", err=True)
    elif not jobs:
        typer.echo("no job; submit one: muster submit --help", err=True)


def show_job(job: Job, output: OutputOption = Output.TABLE) -> None:
    """Show one job: its status, its progress, and each of its ranks."""
    with connected() as client:
        found = client.job(job)
        body = client.connection.get(path_of(found.id))
        summary = found.summary()
    show(output, body, _lines(found.view, summary), [found.id])


def _lines(job: "JobView", summary: "SummaryView") -> Iterator[str]:
    facts = [(name, text) for name, text in _facts(job, summary) if text is not None]
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        yield f"{name:<{width}}  {text}"
    if summary.workers:
        yield ""
        yield from table(_RANKS_HEADER, map(_rank_row, summary.workers))


def _facts(job: "JobView", summary: "SummaryView") -> Iterator[tuple[str, str | None]]:
    from muster.client.progress import duration  # noqa: PLC0415  --help

    yield "job", job.job_id
    yield "name", job.name
    yield "status", f"{job.status} ({job.reason})" if job.reason else job.status
    yield "message", job.message
    yield "ranks", f"{job.world_size}, {job.spec.get('mode', 'of an unknown mode')}"
    yield "runs", shortened(" ".join(what_runs(job.spec).split()), RUNS_WIDTH)
    yield "working in", job.spec.get("working_dir")
    yield "checkpoint in", job.spec.get("checkpoint_dir")
    yield "step", progress_of(summary)
    yield "loss", None if summary.loss is None else f"{summary.loss:.4f}"
    speed = summary.throughput_steps_per_sec
    yield "speed", f"{speed:.1f} steps/s" if speed else None
    yield "ETA", None if summary.eta_seconds is None else duration(summary.eta_seconds)
    yield "saved", _saved(summary)
    is_gang = job.spec.get("restart_scope") == "gang"
    yield (
        "restarts",
        f"{summary.restarts}, of all ranks together" if is_gang else f"{summary.restarts}",
    )
    for name, moment in (
        ("submitted", job.created_at),
        ("started", job.started_at),
        ("finished", job.finished_at),
    ):
        yield name, None if moment is None else f"{shown(moment)} UTC"


def _saved(summary: "SummaryView") -> str | None:
    if not summary.checkpoints_saved:
        return None
    plural = "" if summary.checkpoints_saved == 1 else "s"
    newest = f"the newest at step {summary.last_checkpoint_step}"
    return f"{summary.checkpoints_saved} checkpoint{plural}, {newest}"


def _rank_row(worker: "WorkerView") -> tuple[Cell, ...]:
    return (
        worker.rank,
        worker.state,
        progress_of(worker),
        None if worker.loss is None else f"{worker.loss:.4f}",
        worker.pid,
        shortened(worker.node, NAME_WIDTH),
        worker.restarts,
        worker.last_checkpoint_step,
    )
