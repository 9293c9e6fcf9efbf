"""Deletes the checkpoints of a deleted job, and nothing that lies beside them.

Users choose the place of checkpoints and the job id, and could choose any directory with them. So
an entry is deleted only if its name and a manifest show that a `CheckpointManager` of this job
wrote it. Everything else stays, and so do the directories that hold it. Symbolic links are neither
followed nor deleted.
"""

import errno
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    WITNESS,
    CheckpointName,
    Fence,
    Owner,
    decode_manifest,
    generation_of_temporary,
)
from muster.checkpoints.store import open_store
from muster.contracts.location import Location, S3Location
from muster.contracts.settings.paths import rank_of_checkpoints
from muster.objects.client import THREADS, default_client

BATCH: Final = THREADS
"""So many objects are removed in the time of one."""

_KEY: Final = re.compile(
    r"(?:(worker_\d+)/)?"
    r"(?:LATEST|([^/]+)/(?:manifest\.json|state\.safetensors|witness\.json))",
    re.ASCII,
)


class Entry(NamedTuple):
    """A file, directory, object or unfinished upload of the job."""

    path: Location
    place: Location  # the rank's
    checkpoint: CheckpointName | None = None
    size_bytes: int = 0
    is_directory: bool = False
    upload_id: str | None = None

    @property
    def key(self) -> tuple[Location, CheckpointName | None]:
        return self.place, self.checkpoint


def entries(location: Location, owner: Owner) -> list[Entry]:
    """Return what all ranks of a job have saved, in the order in which to remove it.

    That is every checkpoint whose manifest names the owner or is damaged; and where no other job
    has saved, what has no manifest: LATEST, fences, interrupted saves. Manifests come late, so that
    an interrupted deletion can be repeated, and directories last. Raises OSError,
    `ObjectStoreError` and `CheckpointError`.
    """
    found = [*(_files(location) if isinstance(location, Path) else _objects(location))]
    whole = [entry.key for entry in found if entry.checkpoint and entry.path.name == MANIFEST]
    is_owned: dict[tuple[Location, CheckpointName | None], bool] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        answers = pool.map(lambda key: _is_owned(key[0], key[1], owner), whole)
        is_owned.update(zip(whole, answers, strict=True))
    shared = {place for (place, _), answer in is_owned.items() if not answer}
    owned = [entry for entry in found if is_owned.get(entry.key, entry.place not in shared)]
    if owned and isinstance(location, Path):
        places = {location, *(entry.place for entry in owned)}
        owned += [Entry(place, place, is_directory=True) for place in places]
    return sorted(
        owned,
        key=lambda entry: (entry.is_directory, entry.path.name == MANIFEST, -len(str(entry.path))),
    )


def remove(batch: Sequence[Entry]) -> None:
    """Remove entries unless they are gone or not empty; raises OSError or `ObjectStoreError`."""
    objects = []
    for entry in batch:
        if isinstance(entry.path, Path):
            try:
                (entry.path.rmdir if entry.is_directory else entry.path.unlink)()
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}:
                    raise
        elif entry.upload_id:
            default_client().abort(entry.path, entry.upload_id)
        else:
            objects.append(entry.path)
    if objects:
        default_client().delete(objects)


def _files(place: Path) -> Iterator[Entry]:
    """Yield what may be a job's in a directory, and in those of ranks below it."""
    paths: list[Path] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        paths = [] if place.is_symlink() else list(place.iterdir())
    for path in paths:
        name = CheckpointName.parse(path.name)
        is_temporary = generation_of_temporary(path.name) is not None
        if rank_of_checkpoints(path.name) is not None:
            yield from _files(path)
        elif (name or is_temporary) and path.is_dir() and not path.is_symlink():
            yield Entry(path, place, name, is_directory=True)
            for file in (STATE, WITNESS, MANIFEST):
                yield from _file(path / file, place, name)
        elif path.name == LATEST:
            if LocalStore(place).latest() is not None:  # otherwise it may be another program's
                yield from _file(path, place)
        elif is_temporary or Fence.parse(path.name):
            yield from _file(path, place)


def _file(path: Path, place: Path, checkpoint: CheckpointName | None = None) -> Iterator[Entry]:
    with suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode):
            yield Entry(path, place, checkpoint, found.st_size)


def _objects(location: S3Location) -> Iterator[Entry]:
    """Yield the same below a prefix."""
    client = default_client()
    stored = ((item.name, item.size_bytes, None) for item in client.list(location))
    unfinished = ((key, 0, upload_id) for key, upload_id in client.uploads(location))
    for key, size_bytes, upload_id in chain(stored, unfinished):
        if found := _KEY.fullmatch(key):
            place = location / found[1] if found[1] else location
            name = CheckpointName.parse(found[2] or "")
            if name or key.endswith(LATEST):
                yield Entry(location / key, place, name, size_bytes, upload_id=upload_id)


def _is_owned(place: Location, name: CheckpointName, owner: Owner) -> bool:
    """Return whether a checkpoint is the owner's; a damaged one counts as the owner's."""
    try:
        content = open_store(place).read(name, MANIFEST, MANIFEST_LIMIT_BYTES)
        return owner.owns(decode_manifest(content, f"{place}/{name}"))
    except CheckpointDamaged:
        return True
