"""Deletes the checkpoints of a deleted job, and nothing that lies beside them.

Users choose the checkpoint directory and the job id, and could choose any directory with them. So
an entry is deleted only if its name and its manifest show that a `CheckpointManager` of this job
wrote it. Everything else stays, and so do the directories that hold it. Symbolic links are neither
followed nor deleted.

In an object store the same holds for the keys of objects.
"""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.checkpoints.errors import CheckpointDamaged, checkpoint_errors
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    CheckpointName,
    Fence,
    Owner,
    decode_manifest,
    generation_of_temporary,
)
from muster.checkpoints.s3 import owned_objects
from muster.contracts.location import Location
from muster.contracts.paths import rank_of_checkpoints
from muster.objects.client import default_client


class Entry(NamedTuple):
    """A file, directory or object of the job."""

    path: Location
    is_directory: bool = False
    stored_bytes: int = 0  # of an object

    def remove(self) -> None:
        """Remove it unless it is gone or not empty. Raises OSError or `CheckpointError`."""
        if not isinstance(self.path, Path):
            with checkpoint_errors("deleting", str(self.path)):
                return default_client().delete([self.path])
        try:
            (self.path.rmdir if self.is_directory else self.path.unlink)()
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}:
                raise


def size_bytes(location: Location, owner: Owner) -> int | None:
    """Return the size of the owner's files; None if there are none. Raises as `entries`."""
    files = [entry for entry in entries(location, owner) if not entry.is_directory]
    sizes = (
        it.path.lstat().st_size if isinstance(it.path, Path) else it.stored_bytes for it in files
    )
    return sum(sizes) if files else None


def entries(location: Location, owner: Owner) -> Iterator[Entry]:
    """Yield the entries that all ranks of a job have saved, each directory after its content.

    A caller that removes each entry before the next also removes the directory, unless it holds
    something else. Raises OSError, and in a store `CheckpointError`.
    """
    if not isinstance(location, Path):
        with checkpoint_errors("looking into", str(location)):
            found = owned_objects(default_client(), location, owner)
        yield from (Entry(location / each.name, stored_bytes=each.size_bytes) for each in found)
        return
    entry = None
    for entry in _content(location, owner):
        yield entry
    if entry:
        yield Entry(location, is_directory=True)


def _content(directory: Path, owner: Owner) -> Iterator[Entry]:
    if not _is_directory(directory):
        return
    store = LocalStore(directory)
    paths = list(directory.iterdir())
    is_shared = False
    for path in paths:
        if rank_of_checkpoints(path.name) is not None:
            yield from entries(path, owner)
        elif (name := CheckpointName.parse(path.name)) is not None and _is_directory(path):
            if _is_owned(store, name, owner):
                yield from _checkpoint(path)
            else:
                is_shared = True
    if not is_shared:  # otherwise the remaining entries may be the other job's
        for path in paths:
            yield from _leftovers(store, path)


def _leftovers(store: LocalStore, path: Path) -> Iterator[Entry]:
    """Yield an entry that belongs to no checkpoint: LATEST, a fence, an interrupted save."""
    if generation_of_temporary(path.name) is not None and _is_directory(path):
        yield from _checkpoint(path)
    elif generation_of_temporary(path.name) is not None or Fence.parse(path.name) is not None:
        yield from _file(path)
    elif path.name == LATEST and store.latest() is not None:
        yield Entry(path)


def _checkpoint(path: Path) -> Iterator[Entry]:
    """Yield the files of a checkpoint, finished or not, then its directory."""
    yield from _file(path / MANIFEST)
    yield from _file(path / STATE)
    yield Entry(path, is_directory=True)


def _file(path: Path) -> Iterator[Entry]:
    if path.is_file() and not path.is_symlink():
        yield Entry(path)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_owned(store: LocalStore, name: CheckpointName, owner: Owner) -> bool:
    """Return whether a checkpoint is the owner's; a damaged one counts as the owner's."""
    try:
        content = store.read(name, MANIFEST, MANIFEST_LIMIT_BYTES)
        return owner.owns(decode_manifest(content, str(name)))
    except CheckpointDamaged:
        return True
