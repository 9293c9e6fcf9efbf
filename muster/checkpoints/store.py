"""What a place for checkpoints guarantees, on a disk or in an object store."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from muster.checkpoints.errors import CheckpointDamaged, checkpoint_errors
from muster.checkpoints.format import Packed
from muster.checkpoints.manifest import (
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    CheckpointName,
    Manifest,
    decode_manifest,
)
from muster.contracts.location import Location


class CheckpointStore(Protocol):
    """The checkpoints of one rank, or of a synchronous job as a whole, in one place.

    A checkpoint is a manifest and, if its state has arrays, one file of arrays. Nothing in it ever
    changes; a witness, which no restart needs, may be added. ``LATEST`` names one of them. Every
    implementation keeps these guarantees, for which there is one suite of tests:

    - **Whole or absent.** A writer may be killed at any moment: `read` returns what was committed,
      or raises `CheckpointDamaged`.
    - **Durable.** Once `commit` has returned, `latest` names that checkpoint after any crash.
    - **Fenced.** Once `claim` has returned, no older generation of the same job commits: it raises
      `StaleGeneration`, and `latest` stays. That holds for a commit that has already begun.
    - **Nothing lost.** A commit that fails leaves `latest` and every other checkpoint as they were.
    - **Tidy.** A claim removes what interrupted commits of older generations have left.

    Methods raise `CheckpointNotWritable` or `CheckpointFailed` where they say nothing else. For one
    thread; any number of processes may use the same place.
    """

    @property
    def location(self) -> Location:
        """The place, for messages."""

    def latest(self) -> CheckpointName | None:
        """Return the name in LATEST; None if it is missing or unreadable."""

    def names(self) -> list[CheckpointName]:
        """Return the names of all checkpoints, of any job, in no order."""

    def by_trust(self) -> Iterator[CheckpointName]:
        """Yield the same in the order in which a restart tries them.

        An object store yields LATEST first, whether or not it exists, and lists the others only if
        the caller goes on.
        """

    def read(self, name: CheckpointName, file: str, limit_bytes: int) -> bytearray:
        """Return a file of a checkpoint; raises `CheckpointDamaged` if it cannot be read."""

    def claim(self, generation: int | None, job_uid: str | None) -> int:
        """Fence older generations of the job, and return the generation that may commit now.

        None stands for one above the newest: that of a program started by hand. A place that
        another job has used is taken over. Raises `StaleGeneration`.
        """

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        """Write a checkpoint and make LATEST name it; return its name and the signed manifest.

        The manifest is of the generation that was claimed, and without `files`. The store chooses
        the revision: only it knows cheaply which names are taken. After an error claim again. Also
        raises `StaleGeneration`, and `UnsupportedState` for values that no manifest can hold.
        """

    def put_witness(self, name: CheckpointName, content: bytes) -> None:
        """Write ``witness.json`` beside a manifest; a crash may lose it, or leave a part of it."""

    def rewind(self, name: CheckpointName) -> None:
        """Make LATEST name an older checkpoint, durably; claim first. Raises `StaleGeneration`."""

    def remove(self, name: CheckpointName) -> None:
        """Remove a checkpoint; readers never see an incomplete one.

        If LATEST names it, `rewind` first, unless none remains: a reader takes a LATEST that names
        nothing for no checkpoint.
        """

    def close(self) -> None:
        """Remove what this writer keeps for its next commit. Claim again to go on."""

    def ranks(self) -> list[int]:
        """Return the ranks that have a place of their own (``worker_3``) below this one, sorted."""


def manifest_of(store: CheckpointStore, name: CheckpointName) -> Manifest:
    """Return a checkpoint's verified manifest; raises `CheckpointDamaged`."""
    where = f"{store.location}/{name}/{MANIFEST}"
    manifest = decode_manifest(store.read(name, MANIFEST, MANIFEST_LIMIT_BYTES), where)
    if not manifest.is_named(name):
        raise CheckpointDamaged(f"{where} belongs to another directory")
    return manifest


class StoreOpener(Protocol):
    """Opens the store at a location, as `open_store` does."""

    def __call__(
        self, location: Location, warn: Callable[[str], None] = ..., /
    ) -> CheckpointStore: ...


def open_store(
    location: Location, warn: Callable[[str], None] = lambda _sentence: None
) -> CheckpointStore:
    """Return the store at a location; `warn` takes sentences for the user.

    Raises `CheckpointNotWritable` if this installation cannot use it. Nothing is written.
    """
    # Imported here: stores import this module, and most programs use one of them.
    if isinstance(location, Path):
        from muster.checkpoints.local_store import LocalStore  # noqa: PLC0415

        return LocalStore(location, warn)
    from muster.checkpoints.s3 import S3Store  # noqa: PLC0415
    from muster.objects.client import default_client  # noqa: PLC0415

    with checkpoint_errors("using", str(location)):
        return S3Store(default_client(), location, warn)
