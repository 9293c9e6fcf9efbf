"""Whether a job has checkpoints, and of which way of training: they lie in different places.

One model has one state, which lies in the job's directory; ranks that train by themselves have a
directory each below it. Whoever looks in the wrong place finds nothing, and would begin afresh.
"""

from collections.abc import Iterator
from pathlib import Path

from muster.checkpoints.errors import CheckpointMismatch, mapped
from muster.checkpoints.names import LATEST, CheckpointName
from muster.contracts.layout import rank_of_checkpoints
from muster.contracts.spec import Mode


def refuse_other_mode(directory: Path, mode: Mode) -> None:
    """Raise `CheckpointMismatch` if a job's directory has checkpoints, and none for this mode.

    A directory that is not there has none. Raises another `CheckpointError` where it cannot be
    looked into.
    """
    with mapped("looking into", str(directory)):
        found = set(_modes(directory))
    if not found or mode in found:
        return
    (other,) = found
    raise CheckpointMismatch(
        f"the checkpoints in {directory} are of mode {other}, and a job of mode {mode} cannot go "
        f"on from them: give mode {other}, or begin a job of another id that does not resume"
    )


def holds_checkpoints(directory: Path) -> bool:
    """Return whether a job's directory has any, whole or not; fences alone are none.

    Raises OSError where it cannot be looked into.
    """
    return any(_modes(directory))


def _modes(directory: Path) -> Iterator[Mode]:
    for name in _names_in(directory):
        if _is_of_a_checkpoint(name):
            yield "synchronous"
        elif rank_of_checkpoints(name) is not None and _has_saved(directory / name):
            yield "independent"


def _has_saved(rank: Path) -> bool:
    return any(map(_is_of_a_checkpoint, _names_in(rank)))


def _is_of_a_checkpoint(name: str) -> bool:
    return name == LATEST or CheckpointName.parse(name) is not None


def _names_in(directory: Path) -> list[str]:
    """Return what is in it; nothing is in a directory that is not there, or is none."""
    try:
        return [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
