"""A data set in an object store: shards are downloaded into the host's cache when they are needed.

``dataset.json`` lists the shards with their checksums: one request. A prefix without it is listed,
and its lines are counted only where totals are needed.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from xxhash import xxh3_64, xxh3_128_digest, xxh3_128_hexdigest

from muster.contracts.errors import MusterError
from muster.contracts.location import S3Location
from muster.contracts.shards import Reading, Shard
from muster.datasets.cache import Readers, ShardCache
from muster.datasets.errors import DatasetMissing, ShardChanged, ShardUnreadable
from muster.datasets.index import ShardIndex, Totals, index_beside
from muster.datasets.source import (
    FACTS_NAME,
    NAMES_SHOWN,
    DatasetFacts,
    Listing,
    decode_facts,
    refuse_empty,
    sorted_shard_names,
)
from muster.objects.client import THREADS, S3Client, Stored
from muster.objects.errors import ObjectMissing, PreconditionFailed

WRITING: Final = b'{"writing":'
"""How ``dataset.json`` begins until all shards are there."""

FACTS_LIMIT_BYTES: Final = 16 << 20  # 99,999 shards of 130 bytes

_ATTEMPTS: Final = 3


class S3Source:
    """The shards below a prefix. Raises an `ObjectStoreError`, too."""

    def __init__(self, location: S3Location, client: S3Client, cache: ShardCache) -> None:
        self.location: Final = location
        self._client: Final = client
        self._cache: Final = cache
        self._etags: dict[str, str] = {}
        self.facts: Final = self._read_facts()
        self.shards: Final = list(self.facts.files) if self.facts else []
        if not self.shards:
            found = {item.name: item for item in client.list(location, "shard_")}
            for name in sorted_shard_names(found):
                self._etags[name] = found[name].etag
                self.shards.append(Shard(name, found[name].size_bytes))
        others = [] if self.shards else islice(client.list(location), NAMES_SHOWN)
        refuse_empty(location, self.shards, [item.name for item in others])
        # A key names a version: its checksum, or else its ETag.
        versions = [(shard, shard.xxh3 or self._etags.get(shard.name)) for shard in self.shards]
        texts = [f"{location / shard.name}\0{version}" for shard, version in versions]
        self._keys: Final = [xxh3_128_digest(text.encode()) for text in texts]
        digest = xxh3_128_hexdigest(b"".join(self._keys))
        self.listing: Final = Listing(shards=self.shards, facts=self.facts, digest=digest)
        self._readers: Final = Readers(cache, self._keys)
        self._counting: Final = Lock()

    def path(self, shard_idx: int, reading: Reading | None = None) -> Path:
        key = self._keys[shard_idx]
        self._readers.record_read(shard_idx, reading)
        following = self._after(shard_idx, reading)
        if self._cache.is_coming(key):  # it has its room, which must not go to the next one
            self._prefetch(following)
        self._fetch(shard_idx)
        self._prefetch(following)
        return self._cache.path_of(key)

    def totals(
        self,
        shard_idxs: Iterable[int],
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> list[Totals]:
        """`progress` is called with the numbers of shards while lines are counted."""

        def count(idx: int) -> Totals:
            shown = self.location / self.shards[idx].name
            return ShardIndex.open(self.path(idx), shown=shown).totals

        with self._counting, ThreadPoolExecutor(THREADS) as pool:
            found = {idx: self._known(idx) for idx in shard_idxs}
            missing = [idx for idx, totals in found.items() if totals is None]
            for done, totals in enumerate(pool.map(count, missing)):
                found[missing[done]] = totals
                progress(done + 1, len(missing))
        return [totals for totals in found.values() if totals]

    def close(self) -> None:
        """Let the cache remove what was read."""
        self._readers.close()

    def _read_facts(self) -> DatasetFacts | None:
        try:
            content, _ = self._client.read(self.location / FACTS_NAME, FACTS_LIMIT_BYTES)
        except ObjectMissing:
            return None
        if content.startswith(WRITING):
            raise DatasetMissing(self.location, "is being written, or its writing was cut short")
        return decode_facts(content)

    def _known(self, shard_idx: int) -> Totals | None:
        shard = self.shards[shard_idx]
        if shard.lines is not None and shard.hash_sum is not None:
            return Totals(lines=shard.lines, hash_sum=shard.hash_sum)
        if shard.size_bytes == 0:
            return Totals(lines=0, hash_sum=0)
        path = self._cache.path_of(self._keys[shard_idx])
        with suppress(ShardUnreadable):  # it was removed meanwhile
            return ShardIndex.open(path).totals if index_beside(path).exists() else None
        return None

    def _after(self, shard_idx: int, reading: Reading | None) -> int | None:
        """Return the shard that the same rank reads next, if that is known."""
        if reading is None:
            return None
        own = reading.shard_idxs(len(self.shards))
        place = own.index(shard_idx) + 1
        return None if place == len(own) and not reading.epochs_left else own[place % len(own)]

    def _prefetch(self, shard_idx: int | None) -> None:
        """Begin to fetch a shard, unless that has begun."""

        def fetch(idx: int) -> None:
            with suppress(MusterError, OSError):  # `path` meets them again
                self._fetch(idx, wait=False)

        if shard_idx is not None and not self._cache.is_coming(self._keys[shard_idx]):
            Thread(target=fetch, args=(shard_idx,), daemon=True).start()

    def _fetch(self, shard_idx: int, *, wait: bool = True) -> None:
        shard = self.shards[shard_idx]
        fill = partial(self._download, shard)
        self._cache.fetch(self._keys[shard_idx], shard.size_bytes, fill, wait=wait)

    def _download(self, shard: Shard, file: int) -> None:
        """Fill a file with the shard as it was listed; raises `ShardChanged`."""
        location = self.location / shard.name

        def receive(stored: Stored, pieces: Iterator[bytes]) -> str:
            """Return the checksum."""
            if stored.size_bytes != shard.size_bytes:
                problem = f"has {stored.size_bytes} bytes in the store, not {shard.size_bytes}"
                raise ShardChanged(location, problem)
            digest = xxh3_64()
            with os.fdopen(file, "wb", closefd=False) as target:
                target.seek(0)
                for piece in pieces:
                    target.write(piece)
                    digest.update(piece)
            return digest.hexdigest()

        for _ in range(_ATTEMPTS):
            try:
                checksum = self._client.get(location, receive, self._etags.get(shard.name))
            except (PreconditionFailed, ObjectMissing):
                raise ShardChanged(location, "was replaced or removed in the store") from None
            if shard.xxh3 in (None, checksum):
                return
        raise ShardChanged(location, "does not have the checksum that was listed")
