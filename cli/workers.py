"""``muster workers``, ``incarnations`` and ``audit``: the inside of a job."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click

from cli.connection import connected, job_argument
from cli.output import (
    NAME_WIDTH,
    UNKNOWN,
    Cell,
    Column,
    Output,
    columns,
    moment,
    output_option,
    plural,
    shortened,
    show,
    table,
)
from muster.client import job_path
from muster.contracts.job import TERMINAL
from muster.contracts.views import JobView, SummaryView

AUDIT_UNKNOWN: Final = 2
"""Exit code of an audit that can say neither yes nor no."""

HASH_WIDTH: Final = 16
"""Of a digest in a table: enough to tell two apart."""


_WORKERS: Final[Mapping[str, Column]] = {
    "worker": "worker_id",
    "rank": "rank",
    "state": "state",
    "step": "step",
    "joined": "joined_step",
    "pid": "pid",
    "node": lambda worker: shortened(worker["node"], NAME_WIDTH),
    "beat": lambda worker: (
        None if (age := worker["last_heartbeat_age_seconds"]) is None else f"{age:.1f} s"
    ),
}
_EPOCHS: Final[Mapping[str, Column]] = {
    "epoch": "epoch",
    "samples": "samples",
    "of": "expected_samples",
    "hash": "hash",
    "expected": "expected_hash",
    "once": lambda epoch: {True: "yes", False: "NO", None: None}[epoch["exactly_once"]],
}
_CHECKPOINTS: Final[Mapping[str, Column]] = {
    "step": "step",
    "epoch": "epoch",
    "generation": "generation",
    "ranks' hash": lambda checkpoint: shortened(checkpoint["digest"], HASH_WIDTH),
    "saved at (UTC)": lambda checkpoint: moment(checkpoint["saved_at"]),
}


@click.command()
@job_argument
@output_option
def workers(job: str, output: Output) -> None:
    """List the workers of a job's pool.

    Workers that have left the pool are listed as well.
    """
    with connected() as client:
        found = client.job(job)
        pool = client.connection.get(job_path(found.id, "workers"))
    lines = [*columns(pool["workers"], _WORKERS)]
    wanted = plural(pool["world_size"], "rank")
    if found.is_terminal:
        lines.append(f"{found.id} is {found.status}, world_size was {wanted}")
    else:
        lines.append(f"world_size is {wanted}")
    show(output, pool, lines, (worker["worker_id"] for worker in pool["workers"]))


@click.command()
@job_argument
@click.option(
    "--last", type=click.IntRange(1, 1000), default=20, help="Most processes to show. Default: 20."
)
@output_option
def incarnations(job: str, last: int, output: Output) -> None:
    """List every process of a job and how it ended.

    The newest process comes first.
    """
    with connected() as client:
        whole = client.job(job)
        found = client.connection.get(job_path(whole.id, "incarnations"), {"limit": last})
        summary = whole.summary()
    attempts = found["incarnations"]
    names = (f"{one['rank']}.{one['incarnation']}" for one in attempts)
    show(output, found, attempt_lines(summary, attempts), names)


def attempt_lines(job: SummaryView, attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the job's status, then a row per attempt with the reason of its end below it."""
    reason = f" ({job.reason})" if job.reason else ""
    message = f": {job.message}" if job.message else ""
    yield f"{job.job_id} is {job.status}{reason}{message}"
    if not attempts:
        yield "no process was started" if job.status in TERMINAL else "no process yet"
        return
    steps = {worker.worker_id: worker.step for worker in job.workers}
    rows = (_attempt_row(one, steps) for one in attempts)
    header, *lines = table(
        ("rank", "process", "pid", "started (UTC)", "seconds", "steps", "class"), rows
    )
    yield header
    for line, one in zip(lines, attempts, strict=True):
        yield line
        if one["message"]:
            yield textwrap.indent(one["message"], "      ")


def _attempt_row(one: Mapping[str, Any], steps: Mapping[str, int]) -> tuple[Cell, ...]:
    began = datetime.fromisoformat(one["started_at"])
    ended = datetime.fromisoformat(one["ended_at"]) if one["ended_at"] else None
    first, last = one["step_at_start"], one["step_at_end"]
    # Before an attempt reports its first step, the worker's step is that of the previous attempt.
    if ended is None and first is not None:
        last = steps.get(f"{one['rank']}.{one['incarnation']}", last)
    span = " to ".join(UNKNOWN if step is None else str(step) for step in (first, last))
    return (
        one["rank"],
        one["incarnation"],
        one["pid"],
        f"{began:%m-%d %H:%M:%S}",
        round((ended - began).total_seconds()) if ended else None,
        None if first is None and last is None else span,
        one["retry_class"] if ended else "alive",
    )


@click.command()
@job_argument
@click.option(
    "--last", type=click.IntRange(1, 1000), default=10, help="Most rows to show. Default: 10."
)
@output_option
def audit(job: str, last: int, output: Output) -> None:
    """Check that every sample was read exactly once.

    Exit code 0 if so, 1 if not, 2 if unknown: while the job runs, if it ended
    early, or if its ranks train independently.
    """
    with connected() as client:
        whole = client.job(job).view
        found = client.connection.get(job_path(whole.job_id, "audit"), {"limit": last})
    sentence, code = verdict_of(whole, found)
    show(output, found, [sentence, *_audit_lines(found)], [whole.job_id])
    sys.exit(code)


def verdict_of(job: JobView, audit: Mapping[str, Any]) -> tuple[str, int]:
    """Return whether `job` read every sample exactly once, as a sentence and an exit code."""
    name, status = job.job_id, job.status
    if job.spec["mode"] == "independent":
        return f"{name} trains its ranks independently: there is nothing to audit", AUDIT_UNKNOWN
    if audit["exactly_once"] is not None:
        did = "read" if audit["exactly_once"] else "did NOT read"
        return f"{name} {did} every sample exactly once", int(not audit["exactly_once"])
    # Earlier epochs may be omitted; a later epoch begins only after a whole one.
    has_whole_epoch = any(epoch["exactly_once"] or epoch["epoch"] for epoch in audit["epochs"])
    durable = (
        "every sample of every durable whole epoch was read exactly once"
        if has_whole_epoch
        else "no whole epoch is durable"
    )
    if job.is_terminal:
        return f"{name} is {status} before its last epoch: {durable}", AUDIT_UNKNOWN
    return f"{name} is {status}: {durable}; ask again later", AUDIT_UNKNOWN


def _audit_lines(found: Mapping[str, Any]) -> Iterator[str]:
    for noun, shown in (("epoch", _EPOCHS), ("checkpoint", _CHECKPOINTS)):
        if rows := found[f"{noun}s"]:
            yield ""
            yield from columns(rows, shown)
            # An older server does not send this.
            if omitted := found.get(f"{noun}s_omitted"):
                yield f"({plural(omitted, f'earlier {noun}')} not shown: --last)"
            if noun == "checkpoint":
                yield "(the ranks' hash covers their memory; for the checkpoint: muster digest)"
