"""``muster scale``, ``pause``, ``resume``, ``workers`` and ``audit``: a synchronous job by hand.

What talks HTTP is imported inside the commands, so that ``--help`` answers at once.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from cli.tables import shortened, table
from muster.contracts.environ import api_url

if TYPE_CHECKING:
    from cli.server import Server

NODE_WIDTH: Final = 16
HASH_WIDTH: Final = 16
"""Of a digest as it is shown: enough to tell two apart."""

_WORKER_HEADER: Final = ("worker", "rank", "state", "step", "joined", "pid", "node", "beat")
_EPOCH_HEADER: Final = ("epoch", "samples", "of", "hash", "expected", "once")
_CHECKPOINT_HEADER: Final = ("step", "epoch", "generation", "state's digest", "saved at (UTC)")
_VERDICTS: Final = {
    True: "{job} read every sample exactly once",
    False: "{job} did NOT read every sample exactly once",
    None: "{job}: not known yet, or its ranks train independently",
}

Job = Annotated[str, typer.Argument(help="The job's id.", metavar="JOB")]
Ranks = Annotated[int, typer.Argument(help="Number of ranks.", min=1, metavar="N")]
Last = Annotated[
    int, typer.Option("--last", min=1, max=1000, help="Most epochs and checkpoints to show.")
]


def scale(job: Job, ranks: Ranks) -> None:
    """Give a synchronous job another number of ranks, while it trains."""
    with connected() as server:
        found = server.patch(path_of(job), {"world_size": ranks})
    typer.echo(f"{job} is to have {found['world_size']} ranks; see: muster workers {job}")


def pause(job: Job) -> None:
    """Let a synchronous job take no further step; its ranks stay."""
    with connected() as server:
        server.post(path_of(job, "pause"))
    typer.echo(f"{job} is to pause; end it with: muster resume {job}")


def resume(job: Job) -> None:
    """Let a paused job go on."""
    with connected() as server:
        server.post(path_of(job, "resume"))
    typer.echo(f"{job} is to go on")


def workers(job: Job) -> None:
    """Show who is and was in a job's pool."""
    with connected() as server:
        found = server.get(path_of(job, "workers"))
    for line in table(_WORKER_HEADER, map(_worker_row, found["workers"])):
        typer.echo(line)
    typer.echo(f"{found['world_size']} ranks are wanted")


def audit(job: Job, last: Last = 10) -> None:
    """Show whether a job read every sample exactly once; exit code 1 if it did not."""
    with connected() as server:
        found = server.get(f"{path_of(job, 'audit')}?limit={last}")
    for line in _audit_lines(found):
        typer.echo(line)
    if found["exactly_once"] is False:
        raise typer.Exit(1)


@contextmanager
def connected() -> Iterator["Server"]:
    """Talk to the API for a while."""
    from cli.server import Server  # noqa: PLC0415  brings in httpx

    with Server(api_url(os.environ)) as server:
        yield server


def path_of(job: str, *rest: str) -> str:
    """Return the path of a job, or of something below it."""
    return "/".join(["/jobs", quote(job, safe=""), *rest])


def _worker_row(worker: Mapping[str, Any]) -> tuple[str | int | None, ...]:
    age = worker["last_heartbeat_age_seconds"]
    return (
        worker["worker_id"],
        worker["rank"],
        worker["state"],
        worker["step"],
        worker["joined_step"],
        worker["pid"],
        shortened(worker["node"], NODE_WIDTH),
        None if age is None else f"{age:.1f} s",
    )


def _audit_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if found["epochs"]:
        yield from table(_EPOCH_HEADER, map(_epoch_row, found["epochs"]))
        yield ""
    if found["checkpoints"]:
        yield from table(_CHECKPOINT_HEADER, map(_checkpoint_row, found["checkpoints"]))
        yield ""
    yield _VERDICTS[found["exactly_once"]].format(job=found["job_id"])


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
        checkpoint["saved_at"][:19].replace("T", " "),
    )
