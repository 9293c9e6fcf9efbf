"""``muster ps`` and ``show``: which jobs there are, and how one of them is doing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from cli.connection import connected, job_argument, status_option
from cli.output import (
    NAME_WIDTH,
    Cell,
    Output,
    facts,
    moment,
    output_option,
    plural,
    shortened,
    show,
    table,
)
from muster.client import job_path
from muster.contracts.job import TERMINAL

if TYPE_CHECKING:
    from muster.contracts.views import JobView, SummaryView, WorkerView

HEADER: Final = ("job", "status", "ranks", "step", "loss", "steps/s", "ETA", "restarts", "age")

RUNS_WIDTH: Final = 64
"""Of a command in ``show``, so that its line fits 80 columns."""

_RANKS_HEADER: Final = ("rank", "state", "step", "loss", "pid", "node", "restarts", "saved")


@click.command()
@status_option
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 1000),
    default=20,
    help="Most jobs to show. Default: 20.",
)
@output_option
def ps(status: Sequence[str], limit: int, output: Output) -> None:
    """List jobs, newest first."""
    from muster.contracts.views import SummaryList  # noqa: PLC0415  imports msgspec

    with connected() as client:
        answer = client.connection.ask(
            "GET", "/jobs/summaries", query={"status": status, "limit": limit}
        )
    jobs = answer.read_as(SummaryList).jobs
    now = datetime.now(UTC)
    lines = table(HEADER, [row(job, now) for job in jobs])
    show(output, answer.read_as(object), lines, [job.job_id for job in jobs])
    if answer.total is not None and answer.total > len(jobs):
        click.echo(f"{answer.total - len(jobs)} more: --limit", err=True)
    elif not jobs:
        click.echo("no jobs; submit one: muster submit --help", err=True)


@click.command("show")
@job_argument
@output_option
def show_job(job: str, output: Output) -> None:
    """Show one job and each of its ranks."""
    with connected() as client:
        found = client.job(job)
        body = client.connection.get(job_path(found.id))
        summary = found.summary()
    show(output, body, _lines(found.view, summary), [found.id])


def row(job: SummaryView, now: datetime) -> tuple[Cell, ...]:
    """Return the cells of a job under `HEADER`."""
    from muster.client.progress import duration  # noqa: PLC0415  not needed for --help

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


def what_runs(spec: Mapping[str, Any]) -> str:
    """Return the command of every rank, or the training program."""
    if spec.get("command"):
        return shlex.join(spec["command"])
    return spec.get("program") or "the classifier"


def progress_of(job: SummaryView | WorkerView) -> str | None:
    """Return ``step/total``; None for a program that does not report steps."""
    if job.total_steps is None:
        return str(job.step) if job.step else None
    return f"{job.step}/{job.total_steps}"


def loss_of(job: SummaryView | WorkerView) -> str | None:
    """Return the loss with four decimals."""
    return None if job.loss is None else f"{job.loss:.4f}"


def _lines(job: JobView, summary: SummaryView) -> Iterator[str]:
    yield from facts(_facts(job, summary))
    if summary.workers:
        yield ""
        yield from table(_RANKS_HEADER, map(_rank_row, summary.workers))


def _facts(job: JobView, summary: SummaryView) -> Iterator[tuple[str, str | None]]:
    from muster.client.progress import duration  # noqa: PLC0415  not needed for --help

    yield "job", job.job_id
    yield "name", job.name
    yield "status", f"{job.status} ({job.reason})" if job.reason else job.status
    yield "message", job.message
    yield "ranks", f"{job.world_size}, {job.spec.get('mode', 'mode unknown')}"
    yield "runs", shortened(" ".join(what_runs(job.spec).split()), RUNS_WIDTH)
    yield "working in", job.spec.get("working_dir")
    yield "checkpoint in", job.spec.get("checkpoint_dir")
    yield "step", progress_of(summary)
    yield "loss", loss_of(summary)
    speed = summary.throughput_steps_per_sec
    yield "speed", f"{speed:.1f} steps/s" if speed else None
    yield "ETA", None if summary.eta_seconds is None else duration(summary.eta_seconds)
    if summary.checkpoints_saved:
        saved = plural(summary.checkpoints_saved, "checkpoint")
        yield "saved", f"{saved}, newest at step {summary.last_checkpoint_step}"
    is_gang = job.spec.get("restart_scope") == "gang"
    yield (
        "restarts",
        f"{summary.restarts}, of all ranks together" if is_gang else f"{summary.restarts}",
    )
    for name, time in (
        ("submitted", job.created_at),
        ("started", job.started_at),
        ("finished", job.finished_at),
    ):
        yield name, None if time is None else f"{moment(time)} UTC"


def _rank_row(worker: WorkerView) -> tuple[Cell, ...]:
    return (
        worker.rank,
        worker.state,
        progress_of(worker),
        loss_of(worker),
        worker.pid,
        shortened(worker.node, NAME_WIDTH),
        worker.restarts,
        worker.last_checkpoint_step,
    )
