"""The cache of a host: one download for all, exact eviction, and nothing left by a kill."""

import errno
import fcntl
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from functools import cache as memoized
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.contracts.shards import Reading
from muster.datasets.cache import Readers, ShardCache
from muster.datasets.errors import CacheFull, CacheUnusable

SIZE = 4096
KEYS = [bytes([number]) * 16 for number in range(12)]
SPARE_BYTES = SIZE - 1
"""For the files of readers; not enough for one more shard."""

FORKED = multiprocessing.get_context("fork")


def cache_of(directory: Path, shards: int) -> ShardCache:
    return ShardCache(directory, shards * SIZE + SPARE_BYTES)


def fetch(cache: ShardCache, key: bytes) -> list[bytes]:
    """Return the keys that were downloaded."""
    filled = []

    def fill(file: int) -> None:
        filled.append(key)
        os.pwrite(file, key * (SIZE // 16), 0)

    cache.fetch(key, SIZE, fill)
    return filled


def fewest_downloads(order: list[int], room: int) -> int:
    """Try everything: what is read must be in the cache."""

    @memoized
    def after(place: int, held: frozenset[int]) -> int:
        if place == len(order):
            return 0
        wanted = order[place]
        if wanted in held:
            return after(place + 1, held)
        if len(held) < room:
            return 1 + after(place + 1, held | {wanted})
        return 1 + min(after(place + 1, held - {gone} | {wanted}) for gone in held)

    return after(0, frozenset())


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_eviction_is_optimal_for_epochs(shards: int, room: int, epochs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache = cache_of(Path(directory), room)
        readers = Readers(cache, KEYS[:shards])
        downloads = 0
        for epoch in range(epochs):
            for shard in range(shards):
                readers.record_read(shard, Reading(epochs_left=epochs - epoch - 1))
                downloads += len(fetch(cache, KEYS[shard]))
    assert downloads == fewest_downloads([*range(shards)] * epochs, room)


def test_no_rank_loses_what_it_reads(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 2)
    jobs = [Readers(cache, KEYS[:4]), Readers(cache, KEYS[4:8])]
    for readers, key in zip(jobs, (KEYS[0], KEYS[4]), strict=True):
        readers.record_read(0, Reading(epochs_left=1))
        fetch(cache, key)
    third = Readers(cache, KEYS[8:])
    third.record_read(0, Reading())
    with pytest.raises(CacheFull, match=r"more are needed at the same time.*MUSTER_CACHE_BYTES"):
        fetch(cache, KEYS[8])
    jobs[1].close()
    assert fetch(cache, KEYS[8]) == [KEYS[8]]
    assert [cache.path_of(key).exists() for key in (KEYS[0], KEYS[4])] == [True, False]


def test_early_fetch_removes_nothing_needed_sooner(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 2)
    readers = Readers(cache, KEYS[:4])
    readers.record_read(0, Reading())
    for key in KEYS[:2]:
        fetch(cache, key)
    for key in (KEYS[2], KEYS[8]):
        with pytest.raises(CacheFull):
            fetch(cache, key)
    readers.record_read(1, Reading())
    assert fetch(cache, KEYS[2])
    assert not cache.path_of(KEYS[0]).exists()


def test_shard_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheFull, match=r"of 4095 bytes.*MUSTER_CACHE_BYTES"):
        fetch(cache_of(tmp_path, 0), KEYS[0])


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CacheFull, match=r"No space left on device.*Free disk .*MUSTER_CACHE_DIR"):
        fetch(cache_of(tmp_path, 2), KEYS[0])
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_disk_smaller_than_the_limit_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(file: int, start: int, size_bytes: int) -> None:
        if len(list(tmp_path.glob("*.txt"))) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, start + size_bytes)

    cache, readers = cache_of(tmp_path, 100), Readers(cache_of(tmp_path, 100), KEYS[1:])
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    readers.record_read(0, Reading())
    for key in KEYS[:3]:
        assert fetch(cache, key) == [key]
    assert [cache.path_of(key).exists() for key in KEYS[:3]] == [False, True, True]


def test_cache_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CacheUnusable, match="MUSTER_CACHE_DIR"):
        fetch(cache_of(tmp_path / "cache", 2), KEYS[0])


def test_shards_not_flushed_before_a_boot_stay(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 2)
    for key in KEYS[:2]:
        fetch(cache, key)
    cache.flushing.shutdown()
    assert [cache.path_of(key).stat().st_mode & 0o777 for key in KEYS[:2]] == [0o400] * 2
    cache.path_of(KEYS[1]).chmod(0o600)  # as if the machine went down before
    assert fetch(cache_of(tmp_path, 2), KEYS[1]) == []
    (tmp_path / "lock").write_bytes(bytes(8) + b"another boot")
    later = cache_of(tmp_path, 2)
    assert [fetch(later, key) for key in KEYS[:2]] == [[], [KEYS[1]]]


def test_reader_that_ends_meanwhile_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tmp_path, 1)
    readers = Readers(cache, KEYS[:1])
    readers.record_read(0, Reading())
    fetch(cache, KEYS[0])
    read_bytes = Path.read_bytes

    def close_and_read(path: Path) -> bytes:
        readers.close()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", close_and_read)
    assert fetch(cache, KEYS[1]) == [KEYS[1]]


def test_left_download_is_removed_under_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tmp_path, 1)
    fetch(cache, KEYS[0])
    left = cache.path_of(KEYS[1]).with_suffix(".part")
    left.touch()
    unlink, refused = Path.unlink, []

    def try_to_lock(path: Path, *, missing_ok: bool = False) -> None:
        if path == left:
            with path.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            refused.append(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", try_to_lock)
    fetch(cache, KEYS[2])
    assert refused == [left]


def in_processes(count: int, run: Callable[[int], None]) -> None:
    processes = [FORKED.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def test_processes_download_a_shard_once(tmp_path: Path) -> None:
    def run(number: int) -> None:
        cache = cache_of(tmp_path / "cache", 100)
        done = [key for key in KEYS for key in fetch(cache, key)]
        (tmp_path / str(number)).write_bytes(b"".join(done))

    in_processes(4, run)
    done = b"".join((tmp_path / str(number)).read_bytes() for number in range(4))
    assert sorted(done[start : start + 16] for start in range(0, len(done), 16)) == KEYS


def test_processes_stay_within_the_limit(tmp_path: Path) -> None:
    def run(number: int) -> None:
        cache = ShardCache(tmp_path, 6 * SIZE + 2 * SPARE_BYTES)
        readers = Readers(cache, KEYS)
        for left in (2, 1, 0):
            reading = Reading(rank=number, world_size=3, epochs_left=left)
            for shard in reading.shard_idxs(len(KEYS)):
                readers.record_read(shard, reading)
                fetch(cache, KEYS[shard])
                assert cache.path_of(KEYS[shard]).read_bytes() == KEYS[shard] * (SIZE // 16)
                with cache.locked(fcntl.LOCK_EX):
                    used = sum(path.stat().st_size for path in tmp_path.glob("*.[tp]*"))
                assert used <= cache.limit_bytes

    in_processes(3, run)


def test_killed_download_is_begun_again(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 2)
    begun = FORKED.Event()

    def hang(_file: int) -> None:
        begun.set()
        signal.pause()

    def run() -> None:
        Readers(cache, KEYS).record_read(0, None)
        cache.fetch(KEYS[0], SIZE, hang)

    process = FORKED.Process(target=run)
    process.start()
    assert begun.wait(60)
    with pytest.raises(BlockingIOError):
        cache.fetch(KEYS[0], SIZE, hang, wait=False)
    process.kill()
    process.join()
    for key in KEYS[:3]:
        assert fetch(cache, key) == [key]
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left == {"", ".txt"}, "neither its download nor its reader"
