"""``muster workers``, ``attempts`` and ``audit``: the inside of a job."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click

from cli.connection import connected, job_argument
from cli.output import Column, Output, columns, moment, output_option, plural, shortened, show
from muster.client import job_path
from muster.contracts.job.status import TERMINAL
from muster.contracts.views.job import JobView

AUDIT_UNKNOWN: Final = 2
"""Exit code of an audit that can say neither yes nor no."""

HASH_WIDTH: Final = 16
"""Of a digest in a table: enough to tell two apart."""

NODE_WIDTH: Final = 12
"""Of a machine's name, so that the widest table of workers fits 80 columns."""

_WORKERS: Final[Mapping[str, Column]] = {
    "worker": "worker_id",
    "rank": "rank",
    "state": "state",
    "step": "step",
    "joined": "joined_step",
    "pid": "pid",
    "node": lambda worker: shortened(worker["node"], NODE_WIDTH),
    "device": lambda worker: (
        f"{worker['gpu_count']} GPU" if worker["gpu_count"] else worker["backend"]
    ),
    "beat": lambda worker: (
        None if (age := worker["last_heartbeat_age_seconds"]) is None else f"{age:.1f} s"
    ),
}
_ATTEMPTS: Final[Mapping[str, Column]] = {
    "rank": "rank",
    "attempt": "attempt",
    "pid": "pid",
    "started (UTC)": lambda one: moment(one["started_at"])[5:],  # without the year
    "seconds": lambda one: _seconds(one["started_at"], one["ended_at"]),
    "from": "step_at_start",
    "to step": "step_at_end",
    "class": lambda one: one["retry_class"] if one["ended_at"] else "alive",
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
        changing = "; workers are joining or leaving" if pool["is_changing"] else ""
        lines.append(f"world_size is {wanted}, active: {pool['active']}{changing}")
    show(output, pool, lines, (worker["worker_id"] for worker in pool["workers"]))


@click.command()
@job_argument
@click.option(
    "--last", type=click.IntRange(1, 1000), default=20, help="Most processes to show. Default: 20."
)
@output_option
def attempts(job: str, last: int, output: Output) -> None:
    """List the processes of a job and how each ended.

    The newest process comes first.
    """
    with connected() as client:
        whole = client.job(job).view
        path = job_path(whole.job_id, "attempts")
        answer = client.connection.ask("GET", path, query={"limit": last})
    found = answer.read_as(dict[str, Any])
    attempts = found["attempts"]
    names = (f"{one['rank']}.{one['attempt']}" for one in attempts)
    show(output, found, attempt_lines(whole, attempts), names)
    if answer.total is not None and answer.total > last:
        older = plural(answer.total - last, "older attempt")
        click.echo(f"{older} not shown (--last {min(answer.total, 1000)})", err=True)


def attempt_lines(job: JobView, attempts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the job's status, then a row per attempt with the reason of its end below it."""
    reason = f" ({job.reason})" if job.reason else ""
    message = f": {job.message}" if job.message else ""
    yield f"{job.job_id} is {job.status}{reason}{message}"
    if not attempts:
        yield "no process was started" if job.status in TERMINAL else "no process yet"
        return
    header, *lines = columns(attempts, _ATTEMPTS)
    yield header
    for line, one in zip(lines, attempts, strict=True):
        yield line
        if one["message"]:
            yield textwrap.indent(one["message"], "      ")


def _seconds(began: str, ended: str | None) -> int | None:
    if ended is None:
        return None
    lasted = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
    return round(lasted.total_seconds())


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
        reasons = {"any": "bits any", "unchecked": "its script gave check=False"}
        why = reasons.get(audit.get("bits", "same"))
        bits = f"; its bits are not promised ({why})" if why else ""
        return f"{name} {did} every sample exactly once{bits}", int(not audit["exactly_once"])
    # Earlier epochs may be omitted; a later epoch begins only after a whole one.
    durable = "no whole epoch is durable"
    if any(epoch["exactly_once"] or epoch["epoch"] for epoch in audit["epochs"]):
        durable = "every sample of every durable whole epoch was read exactly once"
    if job.is_terminal:
        return f"{name} is {status} before its last epoch: {durable}", AUDIT_UNKNOWN
    return f"{name} is {status}: {durable}; ask again later", AUDIT_UNKNOWN


def _audit_lines(found: Mapping[str, Any]) -> Iterator[str]:
    for noun, shown in (("epoch", _EPOCHS), ("checkpoint", _CHECKPOINTS)):
        if rows := found[f"{noun}s"]:
            yield ""
            yield from columns(rows, shown)
            if omitted := found[f"{noun}s_omitted"]:
                yield f"({plural(omitted, f'earlier {noun}')} not shown: --last)"
            if noun == "checkpoint":
                yield "(the ranks' hash covers their memory; for the checkpoint: muster digest)"
