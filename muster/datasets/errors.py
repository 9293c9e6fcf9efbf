"""The errors of data sets.

DatasetError
├── DatasetMissing       the directory does not exist, or is not a directory
├── DatasetEmpty         it holds no shards, or shards without a single line
├── ShardUnreadable      the system cannot list or read it
├── ShardChanged         a shard is not the one that was indexed or partly read
├── DatasetDiffers       another member of a group has other samples
├── InvalidSample        a line that is not a valid sample: it has a file and a number
├── DatasetNotWritable   a data set or an index cannot be written there
│   └── DatasetExists    one is there already
├── CacheUnusable        the cache cannot be written
└── CacheFull            a shard does not fit beside those that are being read, or the disk is full
"""

from pathlib import Path
from typing import Final

from muster.contracts.errors import MusterError
from muster.contracts.location import Location

SHOWN_CHARACTERS: Final = 80  # the part of an invalid line that an error shows


class DatasetError(MusterError):
    """A data set cannot be read or written."""


class _NoDataset(DatasetError):
    def __init__(self, directory: Location, problem: str, cure: str = "") -> None:
        cure = cure or f"make one with muster dataset digits --out {directory}"
        super().__init__(f"the data set {directory} {problem}: {cure}")
        self.problem = problem


class DatasetMissing(_NoDataset):
    """There is no data set at `directory`."""


class DatasetEmpty(_NoDataset):
    """`directory` exists and holds no samples."""


class DatasetDiffers(DatasetError):
    """`member`, of the same group, has other samples in its data set."""

    def __init__(self, directory: Location, member: str) -> None:
        super().__init__(
            f"the data set {directory} has other samples than that of {member}: copy one of "
            "them to both machines"
        )


class ShardUnreadable(DatasetError):
    """The operating system cannot list or read `path`."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(
            f"{path} cannot be read ({cause.strerror or cause}): check that it exists and that "
            "this user may read it, and try again"
        )


class ShardChanged(DatasetError):
    """`path` does not hold the content that a position or an index refers to."""

    def __init__(self, path: Location, problem: str) -> None:
        super().__init__(
            f"{path} {problem}: restore the file that the job started with, or start a new job"
        )


class InvalidSample(DatasetError):
    """Line `line_number` (counted from 1) of `path` is invalid."""

    def __init__(self, path: Location, line_number: int, problem: str, line: bytes = b"") -> None:
        shown = f" (it starts with {_excerpt(line)})" if line else ""
        super().__init__(
            f"{path}:{line_number}: {problem}{shown}: correct or remove the line, "
            "and start a new job"
        )


class DatasetNotWritable(DatasetError):
    """Nothing was written to `path`."""

    def __init__(self, path: Location, problem: str) -> None:
        super().__init__(f"cannot write to {path}: {problem}")


class CacheUnusable(DatasetError):
    """The cache at `directory` cannot be made, or belongs to another user."""

    def __init__(self, directory: Path, cause: OSError) -> None:
        super().__init__(
            f"the cache {directory} cannot be used ({cause.strerror or cause}): name a directory "
            "that this user can write to in MUSTER_CACHE_DIR"
        )


class DatasetExists(DatasetNotWritable):
    """`path` holds shards, and they were not to be replaced."""

    def __init__(self, path: Location) -> None:
        super().__init__(path, "it already holds shards; choose another place or add --force")


class CacheFull(DatasetError):
    """There is no room for a shard in the cache at `directory`."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(
            f"the cache {directory} has no room for a shard: {problem}, or name a larger disk in "
            "MUSTER_CACHE_DIR"
        )


def _excerpt(line: bytes) -> str:
    # A UTF-8 character has at most four bytes; repr escapes control characters.
    text = line[: 4 * SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
    return repr(text)[1:-1][:SHOWN_CHARACTERS]
