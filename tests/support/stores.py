"""Places for checkpoints, one of each kind, for the promises that every store keeps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import LATEST, CheckpointName, Fence
from muster.checkpoints.memory import MemoryPlace, MemoryStore
from muster.checkpoints.s3 import S3Store
from muster.checkpoints.store import CheckpointStore
from muster.contracts.paths import rank_place
from muster.objects.client import S3Client
from tests.support.s3_server import bare_client, new_bucket, shared_store


@dataclass(frozen=True)
class Place:
    """A place that any number of stores use at once."""

    open: Callable[[], CheckpointStore]
    """Return another reader or writer, as a new process would have."""
    open_rank: Callable[[int], CheckpointStore]
    """Return a store of the place that a rank has below this one."""
    entries: Callable[[], set[str]]
    """Return what is stored for checkpoints, whole or not; without LATEST and marks of claims."""
    damage: Callable[[CheckpointName, str, bytes | None], None]
    """Replace the bytes of a checkpoint's file; None removes it."""


@contextmanager
def local(directory: Path) -> Iterator[Place]:
    root = directory / "checkpoints" / "job"

    def entries() -> set[str]:
        found = {str(path.relative_to(root)) for path in root.rglob("*")}
        return {name for name in found if name != "LATEST" and Fence.parse(name) is None}

    def damage(name: CheckpointName, file: str, content: bytes | None) -> None:
        path = root / str(name) / file
        path.unlink() if content is None else path.write_bytes(content)

    yield Place(
        open=partial(LocalStore, root),
        open_rank=lambda rank: LocalStore(rank_place(root, rank)),
        entries=entries,
        damage=damage,
    )


@contextmanager
def memory(_directory: Path) -> Iterator[Place]:
    shared, root = MemoryPlace(), Path("/job")

    def entries() -> set[str]:
        found = shared.contents[root].files.items()
        return {f"{name}/{file}" for name, files in found for file in files}

    def damage(name: CheckpointName, file: str, content: bytes | None) -> None:
        files = shared.contents[root].files[name]
        files.pop(file)
        if content is not None:
            files[file] = content

    yield Place(
        open=partial(MemoryStore, shared, root),
        open_rank=lambda rank: MemoryStore(shared, rank_place(root, rank)),
        entries=entries,
        damage=damage,
    )


@contextmanager
def s3(_directory: Path) -> Iterator[Place]:
    access = shared_store()
    root, client, bare = new_bucket(access), S3Client(access), bare_client(access)

    def entries() -> set[str]:
        unfinished = {name for name, _ in client.uploads(root)}
        return unfinished | {stored.name for stored in client.list(root)} - {LATEST}

    def damage(name: CheckpointName, file: str, content: bytes | None) -> None:
        named = {"Bucket": root.bucket, "Key": (root / str(name) / file).prefix}
        if content is None:
            bare.delete_object(**named)
        else:
            bare.put_object(**named, Body=content)

    yield Place(
        open=partial(S3Store, client, root),
        open_rank=lambda rank: S3Store(client, rank_place(root, rank)),
        entries=entries,
        damage=damage,
    )


PLACES: Mapping[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "local": local,
    "memory": memory,
    "s3": s3,
}
