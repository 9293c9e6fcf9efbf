"""Checkpoints in an object store: no replaced writer commits, and no LIST decides anything.

    put state.safetensors if it is absent     what will be named is whole
    put manifest.json if it is absent         and complete
    swap LATEST on its ETag                   it is found: acknowledged

LATEST has two lines: the name of a checkpoint (empty before the first one), and the token of its
writer: ``token <generation> <job> <random>``. A claim swaps the new writer's token into it, so the
next swap of every older writer fails. No two bodies of LATEST are equal, so reading it tells
whether a swap whose answer was lost took place.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointFailed,
    StaleGeneration,
    checkpoint_errors,
)
from muster.checkpoints.format import Packed
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    WITNESS,
    CheckpointName,
    Fence,
    FileFacts,
    Manifest,
    sign,
)
from muster.contracts.location import S3Location
from muster.contracts.settings.paths import rank_of_checkpoints
from muster.objects.client import PART_BYTES, S3Client
from muster.objects.errors import ObjectMissing, ObjectStoreError, PreconditionFailed
from muster.objects.probe import check_store

_CHECKPOINTS: Final = "step_"  # how their names begin
_LATEST: Final = re.compile(r"([\w.]*)\n(?:token (\d{1,19}) ([0-9a-f]{16}) ([0-9a-f]{16})\n)?")
_CLAIM_ATTEMPTS: Final = 20
_LATEST_LIMIT_BYTES: Final = 1 << 16  # a longer one is not read; valid ones have at most 180


class _Latest(NamedTuple):
    """LATEST, as far as it can be read."""

    name: CheckpointName | None = None
    fence: Fence | None = None
    etag: str | None = None  # None if there is no LATEST
    random: str | None = None


class S3Store:
    """A `CheckpointStore` in a prefix of a bucket."""

    def __init__(
        self,
        client: S3Client,
        location: S3Location,
        warn: Callable[[str], None] = lambda _sentence: None,
    ) -> None:
        """`warn` takes sentences for the user about what cannot be removed."""
        self.location: Final = location
        self._where: Final = str(location)
        self._client: Final = client
        self._warn: Final = warn
        self._fence = Fence.of(-1, None)
        self._latest = _Latest()
        self._random = ""  # of the last swap, whether or not it took place
        self._begun: CheckpointName | None = None  # whose commit is under way, or has failed
        self._has_uploaded = False  # in parts, since it was opened

    def latest(self) -> CheckpointName | None:
        with checkpoint_errors("looking into", self._where):
            return self._read_latest().name

    def names(self) -> list[CheckpointName]:
        with checkpoint_errors("listing", self._where):
            return [name for name, files in self._files().items() if MANIFEST in files]

    def by_trust(self) -> Iterator[CheckpointName]:
        latest = self.latest()
        if latest is not None:
            yield latest
        yield from sorted({*self.names()} - {latest}, reverse=True)

    def ranks(self) -> list[int]:
        with checkpoint_errors("listing", self._where):
            ranks = map(rank_of_checkpoints, self._client.folders(self.location))
            return sorted(rank for rank in ranks if rank is not None)

    def read(self, name: CheckpointName, file: str, limit_bytes: int) -> bytearray:
        where = self.location / str(name) / file
        with checkpoint_errors("reading", str(where)):
            try:
                return self._client.read(where, limit_bytes)[0]
            except (ObjectMissing, PreconditionFailed) as error:
                raise CheckpointDamaged(f"{where} cannot be read: {error}") from error

    def claim(self, generation: int | None, job_uid: str | None) -> int:
        """Swap this writer's token into LATEST, then remove what older ones have left."""
        with checkpoint_errors("preparing to save checkpoints in", self._where):
            check_store(self._client, self.location)
            for _ in range(_CLAIM_ATTEMPTS):
                found = self._read_latest()
                fence = found.fence
                is_ours = fence and (job_uid is None or fence.job == Fence.of(0, job_uid).job)
                newest = fence.generation if fence and is_ours else -1
                if generation is None:
                    generation = max(newest, *(name.generation for name in self.names()), -1) + 1
                if newest > generation:
                    raise StaleGeneration(self._where, generation, newest)
                self._fence = Fence.of(generation, job_uid)
                with suppress(PreconditionFailed):  # another claim was faster
                    self._swap(found.name, found.etag)
                    break
            else:
                raise CheckpointFailed(
                    f"{self._where}/{LATEST} was changed by others before each of "
                    f"{_CLAIM_ATTEMPTS} attempts to claim it: end the processes that save there"
                )
            try:
                self._sweep()
            except (ObjectStoreError, CheckpointError) as error:
                self._warn(f"the rest of interrupted saves stays in {self._where}: {error}")
        return generation

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        name, latest = CheckpointName(self._fence.generation, unsigned.step), self._latest.name
        if latest and latest[:2] == name[:2]:
            name = latest._replace(revision=latest.revision + 1)
        with checkpoint_errors("saving a checkpoint in", self._where):
            while (manifest := self._write(name, unsigned, packed)) is None:
                name = name._replace(revision=name.revision + 1)
            self._point_latest(name)
        self._begun = None
        return name, manifest

    def put_witness(self, name: CheckpointName, content: bytes) -> None:
        where = self.location / str(name) / WITNESS
        with checkpoint_errors("writing", str(where)):
            self._client.put_if_absent(where, [memoryview(content)])

    def rewind(self, name: CheckpointName) -> None:
        with checkpoint_errors("going back in", self._where):
            self._point_latest(name)

    def remove(self, name: CheckpointName) -> None:
        """Remove the manifest first: without it there is no checkpoint, and a claim removes all."""
        with checkpoint_errors("deleting", f"{self._where}/{name}"):
            for files in (MANIFEST,), (STATE, WITNESS):
                self._client.delete(self.location / str(name) / file for file in files)

    def close(self) -> None:
        """Abort the uploads of this generation that lost answers or killed processes have left."""
        if self._has_uploaded:
            with suppress(ObjectStoreError):
                self._abort_uploads(self._fence.generation + 1)
            self._has_uploaded = False

    def _read_latest(self) -> _Latest:
        try:
            content, etag = self._client.read(self.location / LATEST, _LATEST_LIMIT_BYTES)
        except ObjectMissing:
            return _Latest()
        if not (found := _LATEST.fullmatch(content.decode("ascii", "replace"))):
            return _Latest(etag=etag)
        fence = Fence(int(found[2]), found[3]) if found[2] else None
        return _Latest(CheckpointName.parse(found[1]), fence, etag, found[4])

    def _swap(self, name: CheckpointName | None, etag: str | None) -> None:
        self._random = os.urandom(8).hex()
        token = f"token {self._fence.generation} {self._fence.job} {self._random}"
        content = f"{name or ''}\n{token}\n".encode()
        etag = self._client.compare_and_swap(self.location / LATEST, content, etag)
        self._latest = _Latest(name, self._fence, etag)

    def _point_latest(self, name: CheckpointName) -> None:
        try:
            self._swap(name, self._latest.etag)
        except PreconditionFailed as failed:
            self._refuse_if_stale(failed)

    def _refuse_if_stale(self, failed: PreconditionFailed) -> None:
        """Raise `StaleGeneration`, or `failed`; return if our swap has taken place after all."""
        found = self._read_latest()
        if found.random != self._random:
            if found.fence is None or found.etag == self._latest.etag:
                raise failed
            # The files stay: the successor may have found them. It retires them by age.
            raise StaleGeneration(self._where, self._fence.generation, found.fence.generation)
        self._latest = found

    def _write(self, name: CheckpointName, unsigned: Manifest, packed: Packed) -> Manifest | None:
        """Put state and manifest; return None if the name is taken."""
        place, self._begun = self.location / str(name), name
        facts = {}
        with suppress(PreconditionFailed):
            if packed.size_bytes:
                self._has_uploaded |= packed.size_bytes > PART_BYTES
                stored = self._client.put_if_absent(place / STATE, [*packed.buffers])
                facts[STATE] = FileFacts(stored.size_bytes, stored.xxh3)
            manifest, content = sign(msgspec.structs.replace(unsigned, files=facts))
            self._client.put_if_absent(place / MANIFEST, [memoryview(content)])
            return manifest
        return None

    def _files(self) -> dict[CheckpointName, set[str]]:
        """Return which files each checkpoint has, complete or not."""
        files = defaultdict(set)
        for stored in self._client.list(self.location, _CHECKPOINTS):
            text, _, file = stored.name.partition("/")
            if name := CheckpointName.parse(text):
                files[name].add(file)
        return files

    def _abort_uploads(self, generation: int) -> None:
        """Abort the uploads of generations before this one, and of our own failed commit."""
        begun = []
        for text, upload_id in self._client.uploads(self.location, _CHECKPOINTS):
            if self._is_left(text.partition("/")[0], generation):
                begun.append((self.location / text, upload_id))
        if begun and self._read_latest().random == self._random:  # none is of a successor
            for where, upload_id in begun:
                self._client.abort(where, upload_id)

    def _is_left(self, text: str, generation: int) -> bool:
        name = CheckpointName.parse(text)
        return name is not None and (name.generation < generation or name == self._begun)

    def _sweep(self) -> None:
        """Remove what has no manifest, from our own failed commit and from older generations.

        They are fenced. A successor of this generation may be writing by now: its own stays. The
        uploads of this generation, such as those of a job's first start, are older than our claim.
        """
        self._abort_uploads(self._fence.generation + 1)
        for name, files in self._files().items():
            if self._is_left(str(name), self._fence.generation) and MANIFEST not in files:
                with suppress(ObjectMissing):  # not every store lists all that it has
                    self._client.head(self.location / str(name) / MANIFEST)
                    continue
                self.remove(name)
        self._begun = None
