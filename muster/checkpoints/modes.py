"""Which way of training a job's checkpoints are of: they lie in different places.

One model has one state, which lies in the job's directory; ranks that train by themselves have a
directory each below it. Whoever looks in the wrong place finds nothing, and would begin afresh.
"""

from collections.abc import Iterator
from pathlib import Path

from muster.checkpoints.errors import CheckpointMismatch, mapped
from muster.checkpoints.names import CheckpointName
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


def _modes(directory: Path) -> Iterator[Mode]:
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        if CheckpointName.parse(entry.name) is not None:
            yield "synchronous"
        elif rank_of_checkpoints(entry.name) is not None:
            yield "independent"
