"""Where data sets and checkpoints lie: a directory, or a prefix in an object store.

Both join with ``/`` and print as users write them, so most code need not know which one it has.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from muster.contracts.errors import MusterError

if TYPE_CHECKING:
    import msgspec

SCHEME: Final = "s3://"

_OTHER_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|.*/s3:/")  # the last: as a path
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class InvalidLocation(MusterError):
    """A text is neither a path nor ``s3://bucket/prefix``."""


@dataclass(frozen=True, slots=True, order=True)
class S3Location:
    """A prefix in a bucket. Its keys begin with ``prefix/``; no prefix means the whole bucket."""

    bucket: str
    prefix: str = ""  # without a slash at either end

    def __truediv__(self, name: str) -> "S3Location":
        return S3Location(self.bucket, f"{self.prefix}/{name}" if self.prefix else name)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the prefix, as of a path."""
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> "S3Location":
        return S3Location(self.bucket, self.prefix.rpartition("/")[0])


Location: TypeAlias = Path | S3Location


def parse_location(text: str, working_dir: Path = Path()) -> Location:
    """Return the location that `text` names; a relative path starts at `working_dir`.

    Raises `InvalidLocation` for another scheme, a bucket's name that no store accepts, and a prefix
    with empty parts, ``.`` or ``..``.
    """
    if not text.startswith(SCHEME):
        if _OTHER_SCHEME.match(text):
            raise InvalidLocation(
                f"{text!r} is not a location: write a path, or s3://bucket/prefix"
            )
        return working_dir / text
    bucket, _, prefix = text.removeprefix(SCHEME).partition("/")
    prefix = prefix.removesuffix("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidLocation(
            f"{text!r} names no bucket: write s3://bucket/prefix; a bucket has 3 to 63 lower-case "
            "letters, digits, dots and hyphens"
        )
    if prefix and {"", ".", ".."} & set(prefix.split("/")):
        raise InvalidLocation(f"{text!r} has an empty part, '.' or '..' in its prefix")
    return S3Location(bucket, prefix)


def expand_home(text: str) -> str:
    """Return a path with the home directory that ``~`` or ``~user`` at its start stands for.

    No shell has read a path in a file, in an environment or in ``--out=~/x``. Raises
    `InvalidLocation` if there is no such user.
    """
    expanded = os.path.expanduser(text)  # noqa: PTH111  a Path would lose the // of s3://
    if expanded.startswith("~"):
        why = "names the home of an unknown user: write the whole path, or ./ before it"
        raise InvalidLocation(f"{text!r} {why}")
    return expanded


HOME_MARK: Final = "~node"
"""In rows of a household, stands for the home directory of the user of whichever node leads."""

_PATH_FIELDS: Final = ("working_dir", "python", "program", "dataset_dir", "checkpoint_dir")

Content = TypeVar("Content", bound="msgspec.Struct")

Moves: TypeAlias = tuple[tuple[str, str], ...]
"""Directories of the coordinator's host, each with what stands for it on this one."""


def moved(path: str, moves: Moves) -> str:
    """Return a path below the first of these directories as it is on this host."""
    for there, here in moves:
        if path == there or path.startswith(f"{there}/"):
            return here + path.removeprefix(there)
    return path


def moved_fields(content: Content, names: Iterable[str], moves: Moves) -> Content:
    """Return a struct with `moved` paths in these fields, those that it has and that are set."""
    from msgspec.structs import replace  # noqa: PLC0415  small commands start without it

    paths = {name: getattr(content, name, None) for name in names}
    return replace(content, **{name: moved(path, moves) for name, path in paths.items() if path})


def moved_job(job: Content, moves: Moves) -> Content:
    """Return a job, or a request for one, with `moved` paths, also as words of its command."""
    from msgspec.structs import replace  # noqa: PLC0415  as above

    changed: dict[str, object] = {}
    for name in _PATH_FIELDS:
        if (path := getattr(job, name, None)) and (there := moved(path, moves)) != path:
            changed[name] = there
    words = getattr(job, "command", None) or ()
    if any(moved(word, moves) != word for word in words):
        changed["command"] = tuple(moved(word, moves) for word in words)
    return replace(job, **changed) if changed else job


def save_lead(checkpoint_dir: Location, host_count: int) -> int:
    """Return how many checkpoints a rank of a gang may be ahead of a rank that it waits for.

    A rank that has saved waits in its next step for one that has not. It may save that step twice:
    in the loop, and at its end. Where a storage process saves, as on other hosts it may, the next
    step may come while the first save is under way, and ends in a save of its own.
    """
    return 2 if isinstance(checkpoint_dir, Path) and host_count == 1 else 3
