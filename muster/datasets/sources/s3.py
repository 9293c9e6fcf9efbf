"""A data set in an object store: shards are downloaded into the host's cache when they are needed.

``dataset.json`` lists the shards with their checksums: one request. A prefix without it is listed,
and its lines are counted only where totals are needed.
"""

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import md5
from pathlib import Path
from secrets import token_hex
from typing import Final

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_digest, xxh3_128_hexdigest

from muster.contracts.errors import MusterError
from muster.contracts.location import S3Location
from muster.contracts.shards import Reading, Shard
from muster.datasets.cache import NEXT, NOW, Readers, ShardCache
from muster.datasets.errors import CacheTooSmall, DatasetMissing, ShardChanged
from muster.datasets.index import ShardIndex, Totals
from muster.datasets.source import (
    FACTS_NAME,
    SHARD_PREFIX,
    WRITING,
    DatasetFacts,
    decode_facts,
    refuse_empty,
    sorted_shard_names,
)
from muster.objects.client import THREADS, S3Client
from muster.objects.errors import ObjectMissing, PreconditionFailed

FACTS_LIMIT_BYTES: Final = 64 << 20

_ATTEMPTS: Final = 3
_MD5: Final = re.compile(r"[0-9a-f]{32}")


class S3Source:
    """The shards below a prefix. Raises an `ObjectStoreError`, too."""

    def __init__(
        self,
        location: S3Location,
        client: S3Client,
        cache: ShardCache,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> None:
        """`progress` is called with the numbers of shards while lines are counted."""
        self.location: Final = location
        self._client: Final = client
        self._cache: Final = cache
        self._progress: Final = progress
        self.facts: Final = self._read_facts()
        self._etags: dict[str, str] = {}
        if self.facts is not None and self.facts.files:
            self.shards = list(self.facts.files)
        else:
            found = {each.name: each for each in client.list(location, SHARD_PREFIX)}
            names = sorted_shard_names(found)
            self._etags = {name: found[name].etag for name in names}
            self.shards = [Shard(name=name, size_bytes=found[name].size_bytes) for name in names]
        refuse_empty(location, self.shards)
        self._keys: Final = [self._key(shard) for shard in self.shards]
        self._readers: Final = Readers(cache, self._keys)
        self._has_md5 = True
        self._prefetching: dict[int, threading.Thread] = {}
        self._counting: Final = threading.Lock()
        self._counted_file: Final = (
            cache.directory / f"{xxh3_128_hexdigest(str(location).encode())}.totals"
        )
        self._counted: dict[str, tuple[int, int]] = {}  # lines and hash sums by key
        with suppress(OSError, msgspec.MsgspecError):
            content = self._counted_file.read_bytes()
            self._counted = msgspec.json.decode(content, type=dict[str, tuple[int, int]])

    def path(self, shard_idx: int, reading: Reading | None = None) -> Path:
        all_bytes = sum(shard.size_bytes for shard in self.shards) if reading is None else 0
        if all_bytes > self._cache.limit_bytes:
            raise CacheTooSmall(
                self._cache.directory,
                f"it is limited to {self._cache.limit_bytes} bytes, and all {all_bytes} of "
                f"{self.location} are read in random order",
            )
        self._readers.note(shard_idx, reading)
        self._fetch(shard_idx, NOW)
        if reading is not None:
            self._prefetch(shard_idx, reading)
        return self._cache.place(self._keys[shard_idx])

    def totals(self, shard_idxs: Iterable[int]) -> list[Totals]:
        wanted = list(shard_idxs)
        with self._counting:
            missing = [idx for idx in wanted if self._known(idx) is None]
            with ThreadPoolExecutor(THREADS) as pool:
                counted = pool.map(lambda idx: ShardIndex.open(self.path(idx)), missing)
                for done, (idx, index) in enumerate(zip(missing, counted, strict=True), start=1):
                    self._counted[self._keys[idx].hex()] = index.lines, index.hash_sum
                    self._progress(done, len(missing))
            if missing:
                self._save_counted()
        return [totals for idx in wanted if (totals := self._known(idx))]

    def known_totals(self, shard_idxs: Iterable[int]) -> list[Totals] | None:
        known = [self._known(idx) for idx in shard_idxs]
        found = [totals for totals in known if totals is not None]
        return found if len(found) == len(known) else None

    def close(self) -> None:
        """Let go of the shards that were read."""
        self._readers.close()

    def _read_facts(self) -> DatasetFacts | None:
        try:
            content, _ = self._client.read(self.location / FACTS_NAME, FACTS_LIMIT_BYTES)
        except ObjectMissing:
            return None
        if content.startswith(WRITING):
            raise DatasetMissing(self.location, "is being written, or its writing was cut short")
        return decode_facts(content)

    def _key(self, shard: Shard) -> bytes:
        version = self._etags.get(shard.name, shard.xxh3)
        return xxh3_128_digest(f"{self.location / shard.name}\0{version}".encode())

    def _known(self, shard_idx: int) -> Totals | None:
        shard = self.shards[shard_idx]
        if shard.lines is not None and shard.hash_sum is not None:
            return Totals(lines=shard.lines, hash_sum=shard.hash_sum)
        if shard.size_bytes == 0:
            return Totals(lines=0, hash_sum=0)
        counted = self._counted.get(self._keys[shard_idx].hex())
        return counted and Totals(lines=counted[0], hash_sum=counted[1])

    def _save_counted(self) -> None:
        temporary = self._counted_file.with_suffix(f".{token_hex(8)}.tmp")
        temporary.write_bytes(msgspec.json.encode(self._counted))
        temporary.rename(self._counted_file)

    def _prefetch(self, shard_idx: int, reading: Reading) -> None:
        own = reading.own(len(self.shards))
        following = own.index(shard_idx) + 1
        if following == len(own) and not reading.epochs_left:
            return
        next_idx = own[following % len(own)]
        last = self._prefetching.get(reading.rank)
        if self._cache.place(self._keys[next_idx]).exists() or (last and last.is_alive()):
            return

        def fetch() -> None:
            with suppress(MusterError, OSError):  # `path` meets them again
                self._fetch(next_idx, NEXT)

        thread = self._prefetching[reading.rank] = threading.Thread(target=fetch, daemon=True)
        thread.start()

    def _fetch(self, shard_idx: int, needed: float) -> None:
        shard = self.shards[shard_idx]
        fill = lambda memory: self._download(shard, memory)  # noqa: E731
        self._cache.fetch(self._keys[shard_idx], shard.size_bytes, needed, fill)

    def _download(self, shard: Shard, memory: memoryview) -> None:
        """Fill `memory` with the shard as it was listed; raises `ShardChanged`."""
        location, etag = self.location / shard.name, self._etags.get(shard.name)
        seen = set()
        for _ in range(_ATTEMPTS):
            try:
                stored = self._client.get(location, memory, etag)
            except (PreconditionFailed, ObjectMissing):
                raise ShardChanged(location, "was replaced or removed in the store") from None
            if stored.size_bytes != shard.size_bytes:
                problem = f"has {stored.size_bytes} bytes in the store, not {shard.size_bytes}"
                raise ShardChanged(location, problem)
            expected = shard.xxh3 or (etag or "").strip('"')
            if shard.xxh3 is None and not (self._has_md5 and _MD5.fullmatch(expected)):
                return  # such as the ETag of an upload in parts
            digest = (xxh3_64_hexdigest if shard.xxh3 else _md5)(memory)
            if digest == expected:
                return
            if digest in seen and shard.xxh3 is None:  # with SSE-KMS an ETag is not the MD5
                self._has_md5 = False
                return
            seen.add(digest)
        raise ShardChanged(location, "does not have the checksum that was listed")


def _md5(memory: memoryview) -> str:
    return md5(memory, usedforsecurity=False).hexdigest()
