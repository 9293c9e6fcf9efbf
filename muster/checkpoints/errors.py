"""What can go wrong with a checkpoint.

CheckpointError
├── CheckpointDamaged       bytes are not what was written; another checkpoint may be intact
├── CheckpointMissing       there is none where somebody looked for one
├── CheckpointMismatch      an intact checkpoint of another rank or another world size
├── StaleGeneration         a newer incarnation has saved: this process is fenced and must exit
├── CheckpointNotWritable   the place cannot be used; starting again will not help
├── CheckpointFailed        the disk refused this time (full, I/O error); it may pass later
├── NotExported             a copy for other programs could not be made, and is not there
└── UnsupportedState        the state holds something that cannot be saved: the program's to mend
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from muster.contracts.errors import MusterError

LASTING: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""Refusals of the operating system that a retry meets again."""


class CheckpointError(MusterError):
    """A checkpoint could not be saved or restored."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is not what its manifest says, or has no manifest that says anything."""


class CheckpointMissing(CheckpointError):
    """There is no such checkpoint, or none at all."""


class CheckpointMismatch(CheckpointError):
    """An intact checkpoint that belongs to another place: other rank, other world size."""


class StaleGeneration(CheckpointError):
    """A commit of `generation` was refused, because `newest` has committed already."""

    def __init__(self, directory: str, generation: int, newest: int) -> None:
        super().__init__(
            f"{directory} holds a checkpoint of generation {newest}, and this process is of "
            f"generation {generation}: it has been replaced and must exit"
        )
        self.generation = generation
        self.newest = newest


class CheckpointNotWritable(CheckpointError):
    """The checkpoint directory cannot be used by this process, now or after a restart."""


class CheckpointFailed(CheckpointError):
    """The operating system reported an error; nothing older was touched."""


class NotExported(CheckpointError):
    """Nothing was written over, and nothing half is left."""


class UnsupportedState(CheckpointError):
    """The state cannot be written down without loss."""


@contextmanager
def mapped(doing: str, where: str) -> Iterator[None]:
    """Turn an `OSError` into `CheckpointNotWritable` or `CheckpointFailed`, facts attached."""
    try:
        yield
    except OSError as error:
        what = f"{doing} {where} failed: {error.strerror or error}"
        if error.errno in LASTING:
            raise CheckpointNotWritable(
                f"{what}. Make the directory usable for this user, or name another one"
            ) from error
        raise CheckpointFailed(
            f"{what}. Older checkpoints are untouched; look at the disk (free space, errors)"
        ) from error
