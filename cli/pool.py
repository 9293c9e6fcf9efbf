"""``muster scale``, ``pause``, ``resume``, ``workers`` and ``audit``: a synchronous job by hand."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.connected import Job, connected
from cli.output import Output, OutputOption, show
from cli.tables import NAME_WIDTH, shortened, table
from cli.times import shown
from muster.client.paths import path_of

if TYPE_CHECKING:
    from muster.client.views import JobView

HASH_WIDTH: Final = 16
"""Of a digest as it is shown: enough to tell two apart."""

_WORKER_HEADER: Final = ("worker", "rank", "state", "step", "joined", "pid", "node", "beat")
_EPOCH_HEADER: Final = ("epoch", "samples", "of", "hash", "expected", "once")
_CHECKPOINT_HEADER: Final = ("step", "epoch", "generation", "ranks' hash", "saved at (UTC)")
WHOSE_HASH: Final = "(the ranks' hash is of what they hold in memory, not that of: muster digest)"
"""Ranks compare themselves with each other, fast; a digest outlives them, and is a sha256."""

UNJUDGED: Final = 2
"""Exit code of an audit that says neither yes nor no."""

SUSPECT_AGENTS: Final = {
    "stopped": "their agent stands still (SIGSTOP): nobody hears them until it is replaced",
    "gone": "their agent is gone: nobody hears them until the next one is there",
}
"""What is said of an agent that does not do its part; ranks go on meanwhile."""

Ranks = Annotated[int, typer.Argument(help="Number of ranks.", min=1, metavar="N")]
Last = Annotated[
    int, typer.Option("--last", min=1, max=1000, help="Most epochs and checkpoints to show.")
]


def scale(job: Job, ranks: Ranks) -> None:
    """Give a synchronous job another number of ranks, while it trains."""
    with connected() as client:
        found = client.job(job).scale(ranks)
    wanted = counted(found.view.world_size)
    typer.echo(f"{found.id} will go on with {wanted}; see: muster workers {found.id}")


def pause(job: Job) -> None:
    """Let a synchronous job take no further step; its ranks stay."""
    with connected() as client:
        found = client.job(job).pause()
    typer.echo(f"{found.id} will pause; let it go on with: muster resume {found.id}")


def resume(job: Job) -> None:
    """Let a paused job go on."""
    with connected() as client:
        found = client.job(job)
        was_paused = found.view.pause_requested
        found.resume()
    said = "goes on" if was_paused else f"is not paused: it is {found.status}"
    typer.echo(f"{found.id} {said}")


def workers(job: Job, output: OutputOption = Output.TABLE) -> None:
    """Show who is and was in a job's pool."""
    with connected() as client:
        whole = client.job(job)
        found = client.connection.get(path_of(whole.id, "workers"))
    names = (worker["worker_id"] for worker in found["workers"])
    show(output, found, _pool_lines(whole.view, found), names)


def audit(job: Job, last: Last = 10, output: OutputOption = Output.TABLE) -> None:
    """Show whether a job read every sample exactly once.

    Exit code 0 if it did, 1 if it did not, 2 if that cannot be said: while it
    runs, where it ended early, and where its ranks train independently.
    """
    with connected() as client:
        whole = client.job(job).view
        found = client.connection.get(path_of(whole.job_id, "audit"), {"limit": last})
    sentence, code = verdict_of(whole, found)
    show(output, found, [*_audit_lines(found), sentence], [whole.job_id])
    raise typer.Exit(code)


def verdict_of(job: "JobView", audit: Mapping[str, Any]) -> tuple[str, int]:
    """Return whether `job` read every sample exactly once, as a sentence and as an exit code."""
    name, status = job.job_id, job.status
    if job.spec["mode"] == "independent":
        return f"{name} trains its ranks independently: there is nothing to audit", UNJUDGED
    if audit["exactly_once"] is not None:
        did = "read" if audit["exactly_once"] else "did NOT read"
        return f"{name} {did} every sample exactly once", int(not audit["exactly_once"])
    # Not every epoch is shown; one that is not the first comes after a whole one.
    is_any_whole = any(epoch["exactly_once"] or epoch["epoch"] for epoch in audit["epochs"])
    durable = (
        "every whole epoch that is durable was read exactly once"
        if is_any_whole
        else "no whole epoch is durable"
    )
    if job.is_terminal:
        return f"{name} is {status}, before its end: {durable}", UNJUDGED
    yet = ", and more are to come" if is_any_whole else " yet"
    return f"{name} is {status}: {durable}{yet}, ask again", UNJUDGED


def counted(ranks: int) -> str:
    """Return a number of ranks in words."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _worker_row(worker: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    age = worker["last_heartbeat_age_seconds"]
    return (
        worker["worker_id"],
        worker["rank"],
        worker["state"],
        worker["step"],
        worker["joined_step"],
        worker["pid"],
        shortened(worker["node"], NAME_WIDTH),
        None if age is None else f"{age:.1f} s",
    )


def _pool_lines(job: "JobView", found: Mapping[str, Any]) -> Iterator[str]:
    yield from table(_WORKER_HEADER, map(_worker_row, found["workers"]))
    wanted = found["world_size"]
    if job.is_terminal:
        were = "was" if wanted == 1 else "were"
        yield f"{job.job_id} is {job.status}: {counted(wanted)} {were} wanted"
        return
    yield f"{counted(wanted)} {'is' if wanted == 1 else 'are'} wanted"
    # An older server does not say, nor what an audit omits.
    if sentence := SUSPECT_AGENTS.get(found.get("agent") or ""):
        yield sentence


def _audit_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if found["epochs"]:
        yield from table(_EPOCH_HEADER, map(_epoch_row, found["epochs"]))
        yield from _omission(found.get("epochs_omitted", 0), "epoch")
        yield ""
    if found["checkpoints"]:
        yield from table(_CHECKPOINT_HEADER, map(_checkpoint_row, found["checkpoints"]))
        yield from _omission(found.get("checkpoints_omitted", 0), "checkpoint")
        yield WHOSE_HASH
        yield ""


def _omission(count: int, what: str) -> Iterator[str]:
    """Say that a table does not begin at the beginning."""
    if count:
        yield f"({count} earlier {what}{'' if count == 1 else 's'} not shown: --last)"


def _epoch_row(epoch: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    return (
        epoch["epoch"],
        epoch["samples"],
        epoch["expected_samples"],
        epoch["hash"],
        epoch["expected_hash"],
        {True: "yes", False: "NO", None: None}[epoch["exactly_once"]],
    )


def _checkpoint_row(checkpoint: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    return (
        checkpoint["step"],
        checkpoint["epoch"],
        checkpoint["generation"],
        shortened(checkpoint["digest"], HASH_WIDTH),
        shown(checkpoint["saved_at"]),
    )
