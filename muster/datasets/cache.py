"""Shards of object stores on this host's disk, for all jobs, processes and threads together.

A cache is a directory with these files, of which ``KEY`` names one version of one object:

    KEY.txt        complete and verified; never changes; read-only once it is flushed to the disk
    KEY.idx        its index, see `muster.datasets.index`
    KEY.part       being downloaded by the holder of its lock; others wait for that
    *.readers      what the ranks of a job read, in their order; locked by the process that reads
    lock           guards what follows: an estimate of the bytes in the directory, and the boot

What is needed last goes first (Belady 1966), which is possible because ranks read their shards in a
fixed order. Locks are flock(2), which end with their holders: files of killed processes are those
without a lock, and the next process that makes room removes them. Reading does not wait for the
disk: what was not flushed when the machine went down is removed after the next boot.
"""

import fcntl
import math
import os
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias
from weakref import finalize

import msgspec

from muster.contracts.shards import Reading
from muster.datasets.errors import CacheFull, CacheUnusable
from muster.host.files import closing

Fill: TypeAlias = Callable[[int], None]
"""Writes the verified content of an object into a file, or raises."""

_BYTES: Final = struct.Struct("<Q")

_SCANNED_SHARE: Final = 0.9
"""From this share of the limit on, files are counted: the estimate does not include indexes."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_Read: TypeAlias = tuple[Reading, int]  # a rank, and the shard that it reads

_READERS: Final = msgspec.json.Decoder(tuple[list[str], list[_Read] | None])
"""Names of all objects; what ranks read of them, or None if it is all of them in random order."""

_OBJECT: Final = (".txt", ".idx")
_LOCKED: Final = (".part", ".readers")

_LEFT_SECONDS: Final = 3600.0
"""A temporary file of an index that is older was left by a killed process."""


class ShardCache:
    """A cache directory, made when it is first used. For any number of threads and processes."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """`limit_bytes` is the most that shards and their indexes take."""
        self._directory: Final = directory
        self.limit_bytes: Final = limit_bytes
        self.flushing: Final = ThreadPoolExecutor(1)  # or it would delay reading

    @cached_property
    def root(self) -> Path:
        """The directory, without what a power failure may have damaged; raises `CacheUnusable`."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._directory / "lock", fcntl.LOCK_EX) as lock:
                boot = _BOOT_ID.read_bytes()
                if os.pread(lock, len(boot), _BYTES.size) != boot:
                    for path in self._directory.iterdir():
                        is_writable = path.stat().st_mode & stat.S_IWUSR
                        if path.name != "lock" and (path.suffix != ".txt" or is_writable):
                            path.unlink()
                    os.pwrite(lock, _BYTES.pack(self.limit_bytes) + boot, 0)
        except OSError as error:
            raise CacheUnusable(self._directory, error) from error
        return self._directory

    def path_of(self, key: bytes) -> Path:
        """Return where the file of an object is, or would be."""
        return self.root / f"{key.hex()}.txt"

    def is_coming(self, key: bytes) -> bool:
        """Return whether an object has its room, because it is there or is being downloaded."""
        path = self.path_of(key)
        with suppress(FileNotFoundError):
            return path.exists() or path.with_suffix(".part").stat().st_size > 0
        return False

    def fetch(self, key: bytes, size_bytes: int, fill: Fill, *, wait: bool = True) -> None:
        """Make sure that an object is there. Only what is needed later is removed for it.

        Raises `CacheFull`, what `fill` does, and `BlockingIOError` for an object that is being
        downloaded already, unless this may `wait` for it.
        """
        path = self.path_of(key)
        part = path.with_suffix(".part")
        how = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        while not path.exists():
            with _locked(part, how) as file:
                if not _is_at(file, part):  # it was renamed or removed while we waited
                    continue
                if path.exists():  # it was renamed since we looked
                    part.unlink()
                    return
                try:
                    self._reserve(file, size_bytes, key.hex())
                    fill(file)
                    with self.locked(fcntl.LOCK_SH):  # not while files are counted
                        part.rename(path)
                except BaseException:
                    part.unlink(missing_ok=True)
                    raise
                with suppress(RuntimeError):  # the process ends, and the file stays unflushed
                    self.flushing.submit(_flush, path)

    def _reserve(self, part: int, size_bytes: int, name: str) -> None:
        """Give `part` its full size on disk, removing other objects if necessary."""
        with self.locked(fcntl.LOCK_EX) as lock:
            os.ftruncate(part, 0)
            noted = os.pread(lock, _BYTES.size, 0)
            used = _BYTES.unpack(noted)[0] if noted else self.limit_bytes
            if used + size_bytes > _SCANNED_SHARE * self.limit_bytes:
                used = self._make_room(size_bytes, name)
            try:
                self._allocate(part, size_bytes)
            except CacheFull:  # the disk is smaller than the limit
                used = self._make_room(size_bytes, name, is_disk_full=True)
                self._allocate(part, size_bytes)
            os.pwrite(lock, _BYTES.pack(used + size_bytes), 0)

    def _allocate(self, part: int, size_bytes: int) -> None:
        try:
            if size_bytes:
                os.posix_fallocate(part, 0, size_bytes)
        except OSError as error:
            os.ftruncate(part, 0)
            problem = f"{error.strerror}, and nothing in it can be removed now. Free disk space"
            raise CacheFull(self._directory, problem) from error

    def _make_room(self, size_bytes: int, wanted: str, *, is_disk_full: bool = False) -> int:
        """Remove what is needed last, and later than `wanted`; return the bytes that are left.

        On a full disk so many bytes are removed, or what can be. Raises `CacheFull` otherwise.
        """
        sizes: Counter[str] = Counter()
        ages: dict[str, float] = {}
        needs: dict[str, float] = {}
        used = 0
        for path, facts in self._files():
            used += facts.st_size
            if path.suffix == ".readers":
                with suppress(FileNotFoundError):  # its source was closed
                    for name, reads in needs_of(path.read_bytes()):
                        needs[name] = min(reads, needs.get(name, math.inf))
            elif path.suffix in _OBJECT:
                sizes[path.stem] += facts.st_size
                ages[path.stem] = facts.st_mtime
        missing = size_bytes if is_disk_full else used + size_bytes - self.limit_bytes
        removed = []
        for name in sorted(sizes, key=lambda name: (-needs.get(name, math.inf), ages[name])):
            if missing <= 0 or (name in needs and needs[name] <= needs.get(wanted, math.inf)):
                break
            removed.append(name)
            missing -= sizes[name]
        if missing > 0 and not is_disk_full:
            problem = f"of {self.limit_bytes} bytes, and {missing} more are needed at the same time"
            raise CacheFull(self._directory, f"{problem}. Raise MUSTER_CACHE_BYTES")
        for name in removed:
            used -= sizes[name]
            for suffix in _OBJECT:
                (self.root / f"{name}{suffix}").unlink(missing_ok=True)
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files of the cache; remove what killed processes have left."""
        for path in self.root.iterdir():
            with suppress(FileNotFoundError):  # an index was finished, and renamed
                facts = path.stat()
                if path.suffix == ".tmp" and time.time() - facts.st_mtime > _LEFT_SECONDS:
                    path.unlink()
                elif path.suffix not in _LOCKED or not _remove_unlocked(path):
                    yield path, facts

    def locked(self, how: int) -> AbstractContextManager[int]:
        """Hold the lock of the cache; yields its file."""
        return _locked(self.root / "lock", how)


class Readers:
    """The ranks of one source: what they need, for every process that makes room to see."""

    def __init__(self, cache: ShardCache, keys: Sequence[bytes]) -> None:
        self._cache: Final = cache
        self._names: Final = msgspec.Raw(msgspec.json.encode([key.hex() for key in keys]))
        self._reads: Final[dict[int, _Read]] = {}
        self._reads_all = False
        self._mutex: Final = threading.Lock()
        self._remove: Callable[[], object] = lambda: None

    @cached_property
    def _file(self) -> int:
        """The locked file of these ranks; for the holder of the cache's lock."""
        path = self._cache.root / f"{os.getpid()}-{os.urandom(8).hex()}.readers"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._remove = finalize(self, _remove, path, file)
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def record_read(self, shard_idx: int, reading: Reading | None) -> None:
        """Record what a rank reads now; from then on it is not removed.

        Nothing is recorded on a full disk: what is removed then is downloaded again.
        """
        with suppress(OSError), self._mutex, self._cache.locked(fcntl.LOCK_SH):
            if self._reads_all:
                return
            if reading is None:
                self._reads_all = True
            else:
                self._reads[reading.rank] = reading, shard_idx
            reads = None if self._reads_all else list(self._reads.values())
            content = msgspec.json.encode([self._names, reads])
            os.ftruncate(self._file, os.pwrite(self._file, content, 0))

    def close(self) -> None:
        """Record that nothing is needed any more."""
        self._remove()


def needs_of(readers: bytes) -> Iterator[tuple[str, float]]:
    """Yield the name of each needed object, and after how many reads of its reader that is."""
    try:
        names, reads = _READERS.decode(readers)
    except msgspec.MsgspecError:  # a full disk
        return
    if reads is None:
        yield from ((name, 0) for name in names)
        return
    for reading, shard_idx in reads:
        own = reading.shard_idxs(len(names))
        now = own.index(shard_idx)
        later = [*own[now:], *(own[:now] if reading.epochs_left else ())]
        yield from ((names[idx], after) for after, idx in enumerate(later))


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    """Hold the lock of a file, which is created if necessary; yield its descriptor."""
    with closing(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
        fcntl.flock(file, how)
        yield file


def _is_at(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _remove_unlocked(path: Path) -> bool:
    """Remove the file of a killed process; False if it is locked by another one."""
    try:
        with _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            path.unlink()  # under its lock: the next holder sees that it is gone
    except BlockingIOError:
        return False
    return True


def _flush(path: Path) -> None:
    """Make an object survive a power failure, and read-only."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        os.fsync(file)
        os.fchmod(file.fileno(), stat.S_IRUSR)


def _remove(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)
