"""A data set in an object store: shards are downloaded into the host's cache when they are needed.

``dataset.json`` lists the shards with their checksums: one request. A prefix without it is listed,
and its lines are counted only where totals are needed.
"""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import md5
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from xxhash import xxh3_64_hexdigest, xxh3_128_digest

from muster.contracts.errors import MusterError
from muster.contracts.location import S3Location
from muster.contracts.shards import Reading, Shard
from muster.datasets.cache import Readers, ShardCache
from muster.datasets.errors import DatasetMissing, ShardChanged, ShardUnreadable
from muster.datasets.index import ShardIndex, Totals, index_beside
from muster.datasets.source import (
    FACTS_NAME,
    DatasetFacts,
    decode_facts,
    refuse_empty,
    sorted_shard_names,
)
from muster.objects.client import THREADS, S3Client
from muster.objects.errors import ObjectMissing, PreconditionFailed

WRITING: Final = b'{"writing":'
"""How ``dataset.json`` begins until all shards are there."""

FACTS_LIMIT_BYTES: Final = 16 << 20  # 99,999 shards of 130 bytes; each reader clears a buffer

_ATTEMPTS: Final = 3
_MD5: Final = re.compile(r'"[0-9a-f]{32}"')  # the ETag of an object that was not uploaded in parts


class S3Source:
    """The shards below a prefix. Raises an `ObjectStoreError`, too."""

    def __init__(
        self,
        location: S3Location,
        client: S3Client,
        cache: ShardCache,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` is called with the numbers of shards while lines are counted."""
        self.location: Final = location
        self._client: Final = client
        self._cache: Final = cache
        self._progress: Final = progress
        self._etags: dict[str, str] = {}
        self._etags_are_md5 = True
        self.facts: Final = self._read_facts()
        self.shards: Final = list(self.facts.files) if self.facts else []
        if not self.shards:
            found = {each.name: each for each in client.list(location, "shard_")}
            for name in sorted_shard_names(found):
                self._etags[name] = found[name].etag
                self.shards.append(Shard(name, found[name].size_bytes))
        refuse_empty(location, self.shards)
        # A key names a version: its checksum, or else its ETag.
        versions = [(shard, shard.xxh3 or self._etags.get(shard.name)) for shard in self.shards]
        texts = [f"{location / shard.name}\0{version}" for shard, version in versions]
        self._keys: Final = [xxh3_128_digest(text.encode()) for text in texts]
        self._readers: Final = Readers(cache, self._keys)
        self._counting: Final = Lock()

    def path(self, shard_idx: int, reading: Reading | None = None) -> Path:
        self._readers.note(shard_idx, reading)
        # The next shard comes at the same time as this one, which has to find room first.
        if self._cache.is_coming(self._keys[shard_idx]):
            self._prefetch(shard_idx, reading)
            self._fetch(shard_idx)
        else:
            self._fetch(shard_idx, lambda: self._prefetch(shard_idx, reading))
        return self._cache.place(self._keys[shard_idx])

    def totals(self, shard_idxs: Iterable[int]) -> list[Totals]:
        def count(shard_idx: int) -> Totals:
            return ShardIndex.open(self.path(shard_idx)).totals

        with self._counting, ThreadPoolExecutor(THREADS) as pool:
            found = {idx: self._known(idx) for idx in shard_idxs}
            missing = [idx for idx, totals in found.items() if totals is None]
            for done, totals in enumerate(pool.map(count, missing)):
                found[missing[done]] = totals
                if self._progress:
                    self._progress(done + 1, len(missing))
        return [totals for totals in found.values() if totals]

    def known_totals(self, shard_idxs: Iterable[int]) -> list[Totals] | None:
        known = [self._known(idx) for idx in shard_idxs]
        found = [totals for totals in known if totals is not None]
        return found if len(found) == len(known) else None

    def _read_facts(self) -> DatasetFacts | None:
        try:
            content, _ = self._client.read(self.location / FACTS_NAME, FACTS_LIMIT_BYTES)
        except ObjectMissing:
            return None
        if content.startswith(WRITING):
            raise DatasetMissing(self.location, "is being written, or its writing was cut short")
        return decode_facts(content)

    def _known(self, shard_idx: int) -> Totals | None:
        shard, place = self.shards[shard_idx], self._cache.place(self._keys[shard_idx])
        if shard.lines is not None and shard.hash_sum is not None:
            return Totals(lines=shard.lines, hash_sum=shard.hash_sum)
        if shard.size_bytes == 0:
            return Totals(lines=0, hash_sum=0)
        with suppress(ShardUnreadable):  # it was removed meanwhile
            return ShardIndex.open(place).totals if index_beside(place).exists() else None
        return None

    def _prefetch(self, shard_idx: int, reading: Reading | None) -> None:
        own = (reading or Reading()).own(len(self.shards))
        following = own.index(shard_idx) + 1
        if reading is None or (following == len(own) and not reading.epochs_left):
            return
        next_idx = own[following % len(own)]

        def fetch() -> None:
            with suppress(MusterError, OSError):  # `path` meets them again
                self._fetch(next_idx, wait=False)

        if not self._cache.is_coming(self._keys[next_idx]):
            Thread(target=fetch, daemon=True).start()

    def _fetch(
        self, shard_idx: int, begun: Callable[[], None] | None = None, *, wait: bool = True
    ) -> None:
        """Fetch a shard; call `begun` when it has its room, and unless it was there."""
        shard = self.shards[shard_idx]

        def fill(memory: memoryview) -> None:
            if begun:
                begun()
            self._download(shard, memory)

        self._cache.fetch(self._keys[shard_idx], shard.size_bytes, fill, wait=wait)

    def _download(self, shard: Shard, memory: memoryview) -> None:
        """Fill `memory` with the shard as it was listed; raises `ShardChanged`."""
        location, etag = self.location / shard.name, self._etags.get(shard.name, "")
        seen = set()
        for _ in range(_ATTEMPTS):
            try:
                stored = self._client.get(location, memory, etag)
            except (PreconditionFailed, ObjectMissing):
                raise ShardChanged(location, "was replaced or removed in the store") from None
            if stored.size_bytes != shard.size_bytes:
                problem = f"has {stored.size_bytes} bytes in the store, not {shard.size_bytes}"
                raise ShardChanged(location, problem)
            if not shard.xxh3 and not (self._etags_are_md5 and _MD5.fullmatch(etag)):
                return
            digest = xxh3_64_hexdigest(memory) if shard.xxh3 else f'"{md5(memory).hexdigest()}"'  # noqa: S324
            if digest in seen and not shard.xxh3:  # the same twice: with SSE-KMS an ETag is no MD5
                self._etags_are_md5 = False
            elif digest != (shard.xxh3 or etag):
                seen.add(digest)
                continue
            return
        raise ShardChanged(location, "does not have the checksum that was listed")
