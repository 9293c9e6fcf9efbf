"""Everything that can be wrong with a data set.

DatasetError
├── DatasetMissing       the directory does not exist, or is no directory
├── DatasetEmpty         it holds no shard, or shards without a single line
├── ShardUnreadable      the system refuses to list or read it
├── ShardChanged         a shard is no longer the one that was indexed or begun
├── InvalidSample        a line that is no sample: it has a file and a number
├── DatasetNotWritable   a data set or an index cannot be written there
└── DigitsUnavailable    scikit-learn, which carries the handwritten digits, is not installed
"""

from pathlib import Path
from typing import Final

from muster.contracts.errors import MusterError

SHOWN_CHARACTERS: Final = 80
"""As much of a bad line as fits into a terminal; the rest is in the file."""


class DatasetError(MusterError):
    """A data set that cannot be read or written as asked."""


class DatasetMissing(DatasetError):
    """There is no data set at `directory`."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"the data set {directory} {problem}: {_make_one(directory)}")
        self.directory = directory


class DatasetEmpty(DatasetError):
    """`directory` exists and holds nothing to train on."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"the data set {directory} {problem}: {_make_one(directory)}")
        self.directory = directory


class ShardUnreadable(DatasetError):
    """The operating system would not let us list or read `path`."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(
            f"{path} cannot be read ({cause.strerror or cause}): check that it exists and that "
            "this user may read it, and try again"
        )
        self.path = path


class ShardChanged(DatasetError):
    """What `path` holds is not what a position or an index was made for."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} {problem}: put back the file that the job began with, or start a new job"
        )
        self.path = path


class InvalidSample(DatasetError):
    """Line `line_number` (counted from 1) of `path` cannot be used."""

    def __init__(self, path: Path, line_number: int, problem: str, line: bytes = b"") -> None:
        shown = f" (it begins {_excerpt(line)})" if line else ""
        super().__init__(
            f"{path}:{line_number}: {problem}{shown}: correct or remove the line, "
            "and start a new job"
        )
        self.path = path
        self.line_number = line_number


class DatasetNotWritable(DatasetError):
    """Nothing was written to `path`, for the reason given."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"cannot write to {path}: {problem}")
        self.path = path


class DigitsUnavailable(DatasetError):
    """The handwritten digits come with scikit-learn, which is optional."""

    def __init__(self) -> None:
        super().__init__(
            "the handwritten digits come with scikit-learn, which is not installed: "
            "run pip install 'muster-train[digits]', or use muster dataset synthetic"
        )


def _make_one(directory: Path) -> str:
    return f"make one with muster dataset digits --out {directory}"


def _excerpt(line: bytes) -> str:
    # Four bytes are the longest UTF-8 character; repr keeps a line from driving the terminal.
    text = line[: 4 * SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
    return repr(text)[1:-1][:SHOWN_CHARACTERS]
