"""A job as a row of a table: the same columns for ``muster ps`` and ``muster top``."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from cli.tables import Cell, narrowed
from muster.contracts.job import TERMINAL

if TYPE_CHECKING:
    from muster.client.views import SummaryView, WorkerView

HEADER: Final = (
    "job",
    "status",
    "ranks",
    "step",
    "loss",
    "steps/s",
    "ETA",
    "restarts",
    "age",
)

SPARE: Final = ("steps/s", "restarts", "ETA", "loss", "age", "ranks")
"""The columns that a narrow terminal is shown without, the first of them first."""


def row(job: "SummaryView", now: datetime) -> tuple[Cell, ...]:
    """Return the cells of a job as of `now`."""
    from muster.client.progress import duration  # noqa: PLC0415  --help

    speed = job.throughput_steps_per_sec
    return (
        job.job_id,
        job.status,
        ranks_of(job),
        progress_of(job),
        None if job.loss is None else f"{job.loss:.4f}",
        f"{speed:.1f}" if speed else None,
        None if job.eta_seconds is None else duration(job.eta_seconds),
        job.restarts,
        duration((now - job.created_at).total_seconds()),
    )


def fitting(rows: Sequence[Sequence[Cell]]) -> tuple[Sequence[str], Sequence[Sequence[Cell]]]:
    """Return the table that a terminal can show with no line broken in two; all of it elsewhere."""
    if not sys.stdout.isatty():
        return HEADER, rows
    return narrowed(HEADER, rows, shutil.get_terminal_size().columns, SPARE)


def what_runs(spec: Mapping[str, Any]) -> str:
    """Return what every rank of a job becomes, or what its ranks train."""
    if spec.get("command"):
        return shlex.join(spec["command"])
    return spec.get("program") or "the classifier"


def ranks_of(job: "SummaryView") -> str:
    """Return how many ranks it has; while it goes on, how many of them have a process."""
    if job.status in TERMINAL:
        return str(job.world_size)
    return f"{job.living}/{job.world_size}"


def progress_of(job: "SummaryView | WorkerView") -> str | None:
    """Return how far it is; None for a program that does not say."""
    if job.total_steps is None:
        return str(job.step) if job.step else None
    return f"{job.step}/{job.total_steps}"
