"""Which checkpoints a person means: those of a job, or what lies in a directory.

They are read from the disk, as they lie there: no service has to run where a directory is named.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli import completion
from cli.connected import connected
from cli.misuse import Misuse
from muster.checkpoints.errors import CheckpointMissing
from muster.checkpoints.names import CheckpointName
from muster.contracts.layout import checkpoints_of_job

if TYPE_CHECKING:
    from muster.checkpoints.reader import Checkpoint
    from muster.checkpoints.shelves import Shelf
    from muster.client.views import JobView

_WITH_STEP: Final = re.compile(r"(.+):(\d+)", re.DOTALL)

_WHOSE: Final = "A job, or a directory: a word with a slash, such as ./checkpoints/my-job"

Where = Annotated[
    str, typer.Argument(metavar="WHERE", help=f"{_WHOSE}.", autocompletion=completion.jobs)
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="WHERE[:STEP]",
        help=f"{_WHOSE}, or what ls -o name says. Without a step the current one.",
        autocompletion=completion.jobs,
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, help="Whose, where each rank has its own.")
]


class WhoseUnsaid(Misuse):
    """Each rank has checkpoints of its own, and nobody said whose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The checkpoints of one job."""

    directory: Path
    shelves: "Sequence[Shelf]"

    @classmethod
    def by(cls, word: str) -> "Held":
        """Return what a word means; raises `ClientError` or `CheckpointMissing`."""
        from muster.checkpoints.shelves import shelves  # noqa: PLC0415  --help

        directory, uid = (Path(word), None) if _is_directory(word) else _of_job(word)
        return cls(directory=directory, shelves=shelves(directory, uid))

    def shelf(self, rank: int | None) -> "Shelf":
        """Return that of a rank, which has to be said unless there is one shelf only."""
        ranks = [shelf.rank for shelf in self.shelves]
        if rank is None and len(ranks) > 1:
            raise WhoseUnsaid(
                f"in {self.directory} each of the ranks {ranks[0]} to {ranks[-1]} has checkpoints "
                "of its own: choose with --rank"
            )
        if rank is not None and rank not in ranks:
            known = ", ".join(map(str, ranks))
            raise CheckpointMissing(f"{self.directory} holds those of rank {known} only")
        return self.shelves[0 if rank is None else ranks.index(rank)]


def checkpoint_named(word: str, rank: int | None) -> "Checkpoint":
    """Return the verified checkpoint that a word means; raises a `MusterError`.

    It is ``WHERE``, ``WHERE:STEP``, or the very directory of a checkpoint.
    """
    path = Path(word)
    if _is_directory(word) and (name := CheckpointName.parse(path.name)):
        return Held.by(f"{path.parent}/").shelf(rank).reader.load(name)
    found = _WITH_STEP.fullmatch(word)
    if found is None or path.is_dir():
        return Held.by(word).shelf(rank).newest()
    return Held.by(found[1]).shelf(rank).of_step(int(found[2]))


def _is_directory(word: str) -> bool:
    return "/" in word or word in {".", ".."}


def _of_job(word: str) -> tuple[Path, str]:
    with connected() as client:
        job = client.job(word).view
    directory = checkpoints_of_job(Path(job.spec["checkpoint_dir"]), job.job_id)
    if not directory.is_dir():
        raise CheckpointMissing(_why_missing(job, directory))
    return directory, job.job_uid


def _why_missing(job: "JobView", directory: Path) -> str:
    if job.spec["command"]:
        return (
            f"nothing of {job.job_id} lies in {directory}: what a command saves through "
            "`import muster` does, and this is to be run on its machine; what it saves by itself "
            "is where its script says"
        )
    return (
        f"{job.job_id} has saved nothing yet, or on another machine than this: its checkpoints "
        f"are to lie in {directory}, where this command has to be run"
    )
