"""What the directories and files of one rank's checkpoints are called.

<rank's directory>/
  LATEST                             one line: the name of a checkpoint
  step_0000000042.g0003/             step 42, saved by generation 3
    manifest.json
    state.safetensors                absent when the state has no arrays
  step_0000000042.g0003.r0001/       the same step saved again by the same generation
  .step_0000000045.g0003.tmp/        being written or being deleted
  .LATEST.g0003.tmp                  being written
  .FENCE.g0003.8d777f385d3dfec8      generation 3 of that job was here: no older one saves any more

A name read from a disk is parsed, never joined to a path as it is: what does not parse does not
exist for us, and is never touched.
"""

import re
from typing import Final, NamedTuple

from xxhash import xxh3_64_hexdigest

LATEST: Final = "LATEST"
MANIFEST: Final = "manifest.json"
STATE: Final = "state.safetensors"

LATEST_LIMIT_BYTES: Final = 128
"""Twice the longest line that can be meant."""

_CHECKPOINT: Final = re.compile(r"step_(\d{10,19})\.g(\d{4,19})(?:\.r(\d{4,19}))?", re.ASCII)
_TEMPORARY: Final = re.compile(
    r"\.(?:LATEST|step_\d{10,19})\.g(\d{4,19})(?:\.r\d+)?(\.gone)?\.tmp", re.ASCII
)
_FENCE: Final = re.compile(r"\.FENCE\.g(\d{4,19})\.([0-9a-f]{16})", re.ASCII)


class CheckpointName(NamedTuple):
    """Sorts by age: generation first, because a later process may have gone back some steps."""

    generation: int
    step: int
    revision: int = 0
    """Counts the saves of one step by one generation, so that no save ever has to move an
    acknowledged checkpoint out of its way."""

    def __str__(self) -> str:
        revision = f".r{self.revision:04d}" if self.revision else ""
        return f"step_{self.step:010d}.g{self.generation:04d}{revision}"

    @property
    def temporary(self) -> str:
        return f".{self}.tmp"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """Return the name that `text` is exactly, or None."""
        found = _CHECKPOINT.fullmatch(text)
        if found is None:
            return None
        name = cls(generation=int(found[2]), step=int(found[1]), revision=int(found[3] or 0))
        return name if str(name) == text else None


def temporary_latest(generation: int) -> str:
    """Return where a generation writes its next LATEST."""
    return f".{LATEST}.g{generation:04d}.tmp"


def generation_of_temporary(text: str) -> int | None:
    """Return who left a temporary file or directory, or None if it is not one of ours."""
    found = _TEMPORARY.fullmatch(text)
    return int(found[1]) if found else None


def out_of_reach(text: str) -> str:
    """Return what to call a temporary directory that whoever fills it is to lose."""
    return text if text.endswith(".gone.tmp") else text.removesuffix(".tmp") + ".gone.tmp"


class Fence(NamedTuple):
    """The mark a generation leaves before it reads or writes. Sorts by age."""

    generation: int
    job: str
    """16 hexadecimal digits: several jobs may have saved here, each with generations of its own."""

    def __str__(self) -> str:
        return f".FENCE.g{self.generation:04d}.{self.job}"

    @classmethod
    def of(cls, generation: int, job_uid: str | None) -> "Fence":
        return cls(generation, xxh3_64_hexdigest((job_uid or "").encode()))

    @classmethod
    def parse(cls, text: str) -> "Fence | None":
        """Return the fence that `text` names, or None."""
        found = _FENCE.fullmatch(text)
        return None if found is None else cls(generation=int(found[1]), job=found[2])


def latest_line(name: CheckpointName) -> bytes:
    """Return what LATEST holds when it names `name`."""
    return f"{name}\n".encode()


def parse_latest(content: bytes | bytearray) -> CheckpointName | None:
    """Return what LATEST names, or None if it is torn or was not written by us."""
    try:
        line = content.decode("ascii")
    except UnicodeDecodeError:
        return None
    return CheckpointName.parse(line[:-1]) if line.endswith("\n") else None
