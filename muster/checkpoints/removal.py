"""The checkpoints of a job that is deleted, removed without anything that lies beside them.

Whoever submits a job names a directory, and the job: together they may name any directory there is.
So nothing goes for where it lies. What goes has the name, the shape and the owner of what a vault
of this job has written; whatever else is there stays, and so do the directories that hold it. No
link is followed, whenever it was put there: each step is taken from a descriptor.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.manifest import MANIFEST_LIMIT_BYTES, decode
from muster.checkpoints.names import (
    LATEST,
    LATEST_LIMIT_BYTES,
    MANIFEST,
    STATE,
    CheckpointName,
    Fence,
    generation_of_temporary,
    parse_latest,
)
from muster.checkpoints.owner import Owner
from muster.contracts.layout import rank_of_checkpoints
from muster.strange_files import closing, open_directory, open_file, open_named_directory

_IS_NONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_STAYS: Final = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST})
"""Somebody else has removed it, or has something in it."""


class Entry(NamedTuple):
    """Something of the job's, in a directory that stays open until the next is looked for."""

    where: int
    name: str
    is_directory: bool = False

    def remove(self) -> None:
        """Remove it, unless somebody has, or has something in it. Raises OSError."""
        try:
            (os.rmdir if self.is_directory else os.unlink)(self.name, dir_fd=self.where)
        except OSError as error:
            if error.errno not in _STAYS:
                raise


def size_bytes(checkpoints: Path, owner: Owner) -> int | None:
    """Return what the owner's files hold; None if there are none. Raises OSError."""
    sizes = [
        os.stat(entry.name, dir_fd=entry.where, follow_symlinks=False).st_size
        for entry in entries(checkpoints, owner)
        if not entry.is_directory
    ]
    return sum(sizes) if sizes else None


def entries(checkpoints: Path, owner: Owner) -> Iterator[Entry]:
    """Yield what all ranks of a job have saved, each directory after what is in it.

    Whoever removes each before the next removes `checkpoints` as well, unless it holds something
    else. Raises OSError.
    """
    with _opened(partial(open_named_directory, checkpoints.parent)) as parent:
        if parent is not None:
            yield from _vault(parent, checkpoints.name, owner)


def _vault(where: int, name: str, owner: Owner) -> Iterator[Entry]:
    """Yield what is in a vault, or in the directory of several, and that itself."""
    found = False
    with _inner(where, name) as directory:
        for entry in () if directory is None else _content(directory, owner):
            found = True
            yield entry
    if found:
        yield Entry(where, name, is_directory=True)


def _content(vault: int, owner: Owner) -> Iterator[Entry]:
    names = os.listdir(vault)
    is_shared = False
    for name in names:
        if rank_of_checkpoints(name) is not None:
            yield from _vault(vault, name, owner)
        elif CheckpointName.parse(name) is not None:
            if _is_of(vault, name, owner):
                yield from _checkpoint(vault, name)
            else:
                is_shared = True
    if is_shared:
        return  # what belongs to no checkpoint may be the other job's
    for name in names:
        if generation_of_temporary(name) is not None:
            yield from _checkpoint(vault, name)
        if Fence.parse(name) is not None or name == LATEST:
            yield from _mark(vault, name)


def _checkpoint(vault: int, name: str) -> Iterator[Entry]:
    """Yield a checkpoint, finished or not; the next LATEST has the name of one, and is a file."""
    with _inner(vault, name) as directory:
        if directory is not None:
            files = (MANIFEST, STATE)
            yield from (Entry(directory, file) for file in files if _is_file(directory, file))
    if directory is not None:
        yield Entry(vault, name, is_directory=True)
    elif _is_file(vault, name):
        yield Entry(vault, name)


def _mark(vault: int, name: str) -> Iterator[Entry]:
    is_ours = name != LATEST or parse_latest(_read(vault, LATEST, LATEST_LIMIT_BYTES)) is not None
    if is_ours and _is_file(vault, name):
        yield Entry(vault, name)


def _is_of(vault: int, name: str, owner: Owner) -> bool:
    """Whether a directory may be the owner's checkpoint: it is none that says it is another's."""
    with _inner(vault, name) as directory:
        if directory is None:
            return False
        try:
            content = _read(directory, MANIFEST, MANIFEST_LIMIT_BYTES)
            return owner.owns(decode(content, name))
        except CheckpointDamaged:
            return True


def _read(where: int, name: str, limit_bytes: int) -> bytes:
    """Return what a file begins with; nothing of what is no file."""
    try:
        descriptor = open_file(name, where)
    except OSError:
        return b""
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123  a descriptor has no path
        return file.read(limit_bytes) or b""


def _is_file(where: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=where, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _inner(where: int, name: str) -> AbstractContextManager[int | None]:
    return _opened(partial(open_directory, name, where))


@contextmanager
def _opened(open_it: Callable[[], int]) -> Iterator[int | None]:
    """Open a directory; None is what is no directory, and a link is none."""
    try:
        descriptor = open_it()
    except OSError as error:
        if error.errno not in _IS_NONE:
            raise
        yield None
        return
    with closing(descriptor):
        yield descriptor
