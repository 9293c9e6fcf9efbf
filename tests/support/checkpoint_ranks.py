"""One rank that saves checkpoints, and states that identify the save they come from."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from muster.checkpoints.format import Packed, State, pack
from muster.checkpoints.local import FileSystem
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manager import CheckpointManager
from muster.checkpoints.manifest import CheckpointName, Fence, Manifest, Owner, RestorePoint
from muster.checkpoints.store import CheckpointStore
from muster.contracts.shards import Position
from tests.support.crash_simulator import MemoryFileSystem

DIRECTORY = Path("/checkpoints/job/worker_0")
NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def owner(
    *,
    job_id: str = "job",
    uid: str | None = "uid",
    generation: int | None = 0,
    rank: int = 0,
    world_size: int = 2,
    restore_from: str | None = None,
) -> Owner:
    return Owner(
        job_id=job_id,
        job_uid=uid,
        rank=rank,
        world_size=world_size,
        generation=generation,
        restore_from=restore_from and RestorePoint.parse(restore_from),
    )


def manager_of(
    store: CheckpointStore,
    owner: Owner,
    warn: Callable[[str], None],
    *,
    keep_last: int = 2,
    inherited: CheckpointStore | None = None,
) -> CheckpointManager:
    return CheckpointManager(
        store=store,
        owner=owner,
        keep_last=keep_last,
        clock=lambda: NOON,
        warn=warn,
        inherited=inherited,
    )


def unsigned(packed: Packed, generation: int, step: int, uid: str | None = "uid") -> Manifest:
    """Return a manifest for `CheckpointStore.commit`, unlike every other."""
    return Manifest(
        step=step,
        time=f"2026-01-02T12:00:00.{time.monotonic_ns()}Z",
        rank=0,
        world_size=2,
        job_id="job",
        job_uid=uid,
        generation=generation,
        position=position(step),
        values=packed.values,
        files={},
    )


def commit(
    store: CheckpointStore,
    generation: int,
    step: int,
    content: State | None = None,
    uid: str | None = "uid",
) -> CheckpointName:
    """Commit a checkpoint to a store that has been claimed."""
    packed = pack(state(generation, step) if content is None else content)
    return store.commit(unsigned(packed, generation, step, uid), packed)[0]


@dataclass
class Rank:
    """A checkpoint manager and its warnings."""

    files: FileSystem = field(default_factory=MemoryFileSystem)
    owner: Owner = field(default_factory=owner)
    keep_last: int = 2
    directory: Path = DIRECTORY
    kind: type[LocalStore] = LocalStore
    warnings: list[str] = field(default_factory=list)
    inherited: Path | None = None

    def __post_init__(self) -> None:
        self.store = self.kind(self.directory, self.warnings.append, self.files)
        earlier = self.inherited and self.kind(self.inherited, self.warnings.append, self.files)
        self.manager = manager_of(
            self.store,
            self.owner,
            self.warnings.append,
            keep_last=self.keep_last,
            inherited=earlier,
        )

    def save(self, *steps: int) -> None:
        for step in steps:
            generation = self.owner.generation or 0
            self.manager.save(step, position(step), state(generation, step))

    def restored(self) -> CheckpointName | None:
        checkpoint = self.manager.restore()
        return checkpoint and checkpoint.name

    def on_disk(self) -> list[str]:
        """Return the names in the directory except fences."""
        names = self.files.list_directory(str(self.directory))
        return sorted(name for name in names if Fence.parse(name) is None)


def position(step: int) -> Position:
    return Position(step=step, line_idx=16 * step, consumed_hash=2**64 - 1 - step)


def state(generation: int, step: int) -> dict[str, object]:
    weights = np.arange(40, dtype=np.float32) + 1000 * generation + step
    return {"weights": weights, "bias": np.float64(step), "generation": generation, "loss": None}


def flipped(content: Iterable[int], index: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[index] ^= 1 << bit
    return bytes(changed)
