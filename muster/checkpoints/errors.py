"""The errors of checkpoints.

CheckpointError
├── CheckpointDamaged       the bytes differ from what was written; another checkpoint may be intact
├── RestoreDamaged          the one from which a whole gang resumes; an older one may be intact
├── CheckpointMissing       no checkpoint was found
├── CheckpointMismatch      an intact checkpoint that this process cannot continue
│   └── OtherData           the data set on this host is not that of the checkpoint
├── OtherArithmetic         this host does not compute the bits of the job's checkpoint
├── StaleGeneration         a newer attempt has saved: this process is fenced and must exit
├── CheckpointNotWritable   the directory cannot be used; a restart would not help
├── CheckpointFailed        an I/O error that may pass (disk full, bad sector)
├── ExportFailed            a copy for other programs could not be made
└── UnsupportedState        the program's state holds a value that cannot be saved
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from muster.contracts.errors import MusterError
from muster.objects.errors import ObjectStoreError, StoreRefused

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
"""Errors of the operating system that a retry would meet again."""


class CheckpointError(MusterError):
    """A checkpoint could not be saved or restored."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint differs from its manifest, or its manifest is unreadable."""


class RestoreDamaged(CheckpointError):
    """The checkpoint from which all ranks of a gang resume is damaged in this rank's place.

    A restart may help: the gang then resumes from an older one.
    """


class CheckpointMissing(CheckpointError):
    """The requested checkpoint, or any checkpoint, does not exist."""


class CheckpointMismatch(CheckpointError):
    """An intact checkpoint of another rank, world size or model, or one that needs torch here."""


class OtherData(CheckpointMismatch):
    """The checkpoint was computed with another data set than the one on this host."""


class OtherArithmetic(CheckpointError):
    """The checkpoint of this job was computed with other bits than this process would compute."""


class StaleGeneration(CheckpointError):
    """A commit of `generation` was refused, because `newest` is already here."""

    def __init__(self, directory: str, generation: int, newest: int) -> None:
        super().__init__(
            f"{directory} was claimed by another process, of generation {newest}, after this one, "
            f"of generation {generation}: it has been replaced and must exit"
        )


class CheckpointNotWritable(CheckpointError):
    """The checkpoint directory cannot be used, now or after a restart."""


class CheckpointFailed(CheckpointError):
    """The operating system reported an error; older checkpoints are untouched."""


class ExportFailed(CheckpointError):
    """Nothing was overwritten, and nothing incomplete is left."""


class UnsupportedState(CheckpointError):
    """The state cannot be saved without loss."""


@contextmanager
def checkpoint_errors(doing: str, where: str) -> Iterator[None]:
    """Turn errors of disks and stores into `CheckpointNotWritable` or `CheckpointFailed`."""
    try:
        yield
    except ObjectStoreError as error:
        kind = CheckpointNotWritable if isinstance(error, StoreRefused) else CheckpointFailed
        raise kind(f"{doing} {where} failed: {error}") from error
    except OSError as error:
        problem = f"{doing} {where} failed: {error.strerror or error}"
        if error.errno in LASTING:
            raise CheckpointNotWritable(
                f"{problem}. Make the directory usable for this user, or choose another one"
            ) from error
        raise CheckpointFailed(
            f"{problem}. Older checkpoints are untouched; check the disk (free space, errors)"
        ) from error
