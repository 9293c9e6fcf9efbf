"""Checkpoints in the memory of one process, for tests and for trying things out."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, StaleGeneration
from muster.checkpoints.format import Packed
from muster.checkpoints.manifest import MANIFEST, STATE, CheckpointName, FileFacts, Manifest, sign
from muster.contracts.location import Location
from muster.contracts.paths import rank_of_checkpoints


@dataclass(slots=True)
class Contents:
    """What one location holds."""

    files: dict[CheckpointName, dict[str, bytes]] = field(default_factory=dict)
    latest: CheckpointName | None = None
    claims: dict[str | None, int] = field(default_factory=dict)
    """The newest generation of each job."""


class MemoryPlace:
    """The locations that several stores share. Safe for threads."""

    def __init__(self) -> None:
        self.lock: Final = Lock()
        self.contents: Final[defaultdict[Location, Contents]] = defaultdict(Contents)


class MemoryStore:
    """A `CheckpointStore` that is gone with its process."""

    def __init__(self, place: MemoryPlace, location: Location = Path("/memory")) -> None:
        self.location: Final = location
        self._place: Final = place
        self._contents: Final = place.contents[location]
        self._generation = -1
        self._job_uid: str | None = None

    def latest(self) -> CheckpointName | None:
        return self._contents.latest

    def names(self) -> list[CheckpointName]:
        with self._place.lock:
            return list(self._contents.files)

    def by_trust(self) -> Iterator[CheckpointName]:
        latest = self.latest()
        yield from sorted(self.names(), key=lambda name: (name == latest, name), reverse=True)

    def ranks(self) -> list[int]:
        below = [at.name for at in [*self._place.contents] if at.parent == self.location]
        return sorted(rank for name in below if (rank := rank_of_checkpoints(name)) is not None)

    def read(self, name: CheckpointName, file: str, limit_bytes: int) -> bytearray:
        content = self._contents.files.get(name, {}).get(file)
        if content is None or len(content) > limit_bytes:
            raise CheckpointDamaged(f"{self.location}/{name}/{file} cannot be read")
        return bytearray(content)

    def claim(self, generation: int | None, job_uid: str | None) -> int:
        self._job_uid = job_uid
        with self._place.lock:
            self._generation = self._newest() + 1 if generation is None else generation
            self._refuse_if_stale()
            self._contents.claims[job_uid] = self._generation
        return self._generation

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        files = {STATE: b"".join(packed.buffers)} if packed.buffers else {}
        facts = {file: FileFacts(len(it), xxh3_64_hexdigest(it)) for file, it in files.items()}
        manifest, files[MANIFEST] = sign(msgspec.structs.replace(unsigned, files=facts))
        with self._place.lock:
            self._refuse_if_stale()
            name = CheckpointName(self._generation, unsigned.step)
            while name in self._contents.files:
                name = name._replace(revision=name.revision + 1)
            self._contents.files[name] = files
            self._contents.latest = name
        return name, manifest

    def remove(self, name: CheckpointName) -> None:
        with self._place.lock:
            self._contents.files.pop(name, None)

    def close(self) -> None:
        """Nothing is kept."""

    def _newest(self) -> int:
        """Return the newest generation of this job; of every job for a process started by hand."""
        claims = self._contents.claims
        return max([-1, *(claims[job] for job in claims if self._job_uid in {None, job})])

    def _refuse_if_stale(self) -> None:
        if (newest := self._newest()) > self._generation:
            raise StaleGeneration(str(self.location), self._generation, newest)
