"""The names of a rank's checkpoint files, and the manifest that describes one checkpoint.

<rank's directory>/
  LATEST                             one line: the name of a checkpoint
  step_0000000042.g0003/             step 42, saved by generation 3
    manifest.json
    state.safetensors                absent when the state has no arrays
    witness.json                     what the next step came out as; only compared, may be missing
  step_0000000042.g0003.r0001/       the same step saved again by the same generation
  .step_0000000045.g0003.tmp/        being written or being deleted
  .LATEST.g0003.tmp                  being written
  .FENCE.g0003.8d777f385d3dfec8      generation 3 of that job was here: older ones must not save

Names found on disk are parsed, never used in a path as they are; other names are never touched.

A manifest is JSON with a hash of itself: its last field is the xxh3 of the file's own bytes with
that field empty, so any flipped bit is detected, even one that leaves valid JSON.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, UnsupportedState
from muster.contracts.errors import WireError
from muster.contracts.job.field_types import StepChoice
from muster.contracts.shards import Position

LATEST: Final = "LATEST"
MANIFEST: Final = "manifest.json"
STATE: Final = "state.safetensors"
WITNESS: Final = "witness.json"

LATEST_LIMIT_BYTES: Final = 128  # twice the longest valid line

FORMAT: Final = 1

SCHEDULE: Final = "muster.course"
"""The value of a synchronous checkpoint that decides which sample is read when: batch size, seed
and data set. A position is valid for this schedule only."""

VIRTUAL_SHARDS: Final = "muster.virtual_shards"
"""Another one, which decides the order of every sum; absent in checkpoints of older versions. It is
no part of a checkpoint's identity, which it would change."""

BEST: Final = "muster.best"
"""The value of the metric of `keep_best`, in a checkpoint that was the best so far. It is no part
of the state."""

ARITHMETIC: Final = "muster.arithmetic"
"""The value of any checkpoint that says which arithmetic has computed the state: digest and facts
(`muster.runtime.fingerprint`). It is no part of the state."""

VALUES: Final = "muster.values"
"""`Committed.values` of a synchronous checkpoint, if there are any: JSON text."""

MANIFEST_LIMIT_BYTES: Final = 16 << 20
"""Values are for counters, names and random states; larger data belongs in an array. A witness
has about 100 bytes for each parameter."""

_CHECKPOINT: Final = re.compile(r"step_(\d{10,19})\.g(\d{4,19})(?:\.r(\d{4,19}))?", re.ASCII)
_TEMPORARY: Final = re.compile(
    r"\.(?:LATEST|step_\d{10,19})\.g(\d{4,19})(?:\.r\d+)?(?:\.[0-9a-f]{16})?(\.gone)?\.tmp",
    re.ASCII,
)
_FENCE: Final = re.compile(r"\.FENCE\.g(\d{4,19})\.([0-9a-f]{16})(?:\.([0-9a-f]{16}))?", re.ASCII)
_SIGNED: Final = re.compile(rb'"manifest_xxh3":"([0-9a-f]{16})"}\Z')


class CheckpointName(NamedTuple):
    """Sorts by age: generation first, because a later process may have gone back some steps."""

    generation: int
    step: int
    revision: int = 0
    """Counts the saves of one step by one generation, so that a save never has to move an
    acknowledged checkpoint out of its way."""

    def __str__(self) -> str:
        revision = f".r{self.revision:04d}" if self.revision else ""
        return f"step_{self.step:010d}.g{self.generation:04d}{revision}"

    def temporary(self, writer: str = "") -> str:
        return f".{self}{writer and f'.{writer}'}.tmp"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """Return the name that `text` is exactly, or None."""
        found = _CHECKPOINT.fullmatch(text)
        if found is None:
            return None
        name = cls(generation=int(found[2]), step=int(found[1]), revision=int(found[3] or 0))
        return name if str(name) == text else None


def parse_names(texts: Iterable[str]) -> list[CheckpointName]:
    """Return the names that another process has sent; raises `WireError`."""
    names = [(text, CheckpointName.parse(text)) for text in texts]
    if wrong := [text for text, name in names if name is None]:
        raise WireError(f"a process named {wrong[0]!r}, which is not a checkpoint")
    return [name for _, name in names if name is not None]


class RestorePoint(NamedTuple):
    """The checkpoint from which the ranks of a gang resume. Its text is a variable of ranks."""

    name: CheckpointName | None = None  # None: start from scratch
    is_inherited: bool = False  # it is one of the job named by `resume_from`
    savers: tuple[int, ...] = ()  # the only ranks that save and resume; empty: all of them

    def __str__(self) -> str:
        place = "resume_from/" if self.is_inherited else ""
        ranks = f"@{','.join(map(str, self.savers))}" if self.savers else ""
        return f"{place}{self.name or 'none'}{ranks}"

    @classmethod
    def parse(cls, text: str) -> "RestorePoint":
        """Return the point of a text; raises `ValueError`: a typing error must delete nothing."""
        bare, _, ranks = text.partition("@")
        name = CheckpointName.parse(bare.removeprefix("resume_from/"))
        if name is None and text != "none":
            raise ValueError(f"{text!r} is not a restore point")
        savers = tuple(map(int, ranks.split(","))) if ranks else ()
        return cls(name, bare.startswith("resume_from/"), savers)

    def is_for(self, rank: int) -> bool:
        """Return whether this rank has the checkpoint."""
        return self.name is not None and (not self.savers or rank in self.savers)


class Fence(NamedTuple):
    """The marker that a generation leaves before it reads or writes. Sorts by age."""

    generation: int
    job: str  # 16 hexadecimal digits: several jobs may save here, each with generations of its own
    writer: str = (
        ""  # 16 more, of one claim among those of a generation that come through a network
    )

    def __str__(self) -> str:
        writer = self.writer and f".{self.writer}"
        return f".FENCE.g{self.generation:04d}.{self.job}{writer}"

    @classmethod
    def of(cls, generation: int, job_uid: str | None, writer: str = "") -> "Fence":
        return cls(generation, xxh3_64_hexdigest((job_uid or "").encode()), writer)

    def replaces(self, other: "Fence") -> bool:
        """Return whether the writer of another fence may not commit once this one is up."""
        if self.generation != other.generation:
            return self.generation > other.generation
        return self.job == other.job and self.writer != other.writer

    @classmethod
    def parse(cls, text: str) -> "Fence | None":
        """Return the fence that `text` names, or None."""
        found = _FENCE.fullmatch(text)
        return None if found is None else cls(int(found[1]), found[2], found[3] or "")


def temporary_latest(generation: int, writer: str = "") -> str:
    """Return where a generation writes its next LATEST."""
    return f".{LATEST}.g{generation:04d}{writer and f'.{writer}'}.tmp"


def generation_of_temporary(text: str) -> int | None:
    """Return the generation that made a temporary file or directory, or None."""
    found = _TEMPORARY.fullmatch(text)
    return int(found[1]) if found else None


def revoked(text: str) -> str:
    """Return a new name for a temporary entry, under which its writer cannot find it."""
    return text if text.endswith(".gone.tmp") else text.removesuffix(".tmp") + ".gone.tmp"


def latest_line(name: CheckpointName) -> bytes:
    """Return the content of LATEST for `name`."""
    return f"{name}\n".encode()


def parse_latest(content: bytes | bytearray) -> CheckpointName | None:
    """Return the name in LATEST, or None if it is torn or not ours."""
    try:
        line = content.decode("ascii")
    except UnicodeDecodeError:
        return None
    return CheckpointName.parse(line[:-1]) if line.endswith("\n") else None


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and hash of a file."""

    size_bytes: int
    xxh3: str  # 16 hexadecimal digits


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one checkpoint but the bytes of its arrays."""

    format: int = FORMAT
    step: int
    time: str  # when the save began: RFC 3339, UTC
    rank: int
    world_size: int
    job_id: str
    job_uid: str | None  # None when the program was started by hand
    generation: int  # the fencing token: commits of older generations are refused
    position: Position
    values: dict[str, Any]  # the state's values as JSON, see `muster.checkpoints.format`
    files: dict[str, FileFacts]
    manifest_xxh3: str = ""

    @property
    def state_values(self) -> dict[str, Any]:
        beside = (ARITHMETIC, BEST)
        return {name: value for name, value in self.values.items() if name not in beside}

    def is_at(self, step: StepChoice | None) -> bool:
        """Return whether this may be the checkpoint of a step; see `ResumeFrom`."""
        return BEST in self.values if step == "best" else step in (None, self.step)

    def is_named(self, name: CheckpointName) -> bool:
        """Return whether this manifest belongs in the directory `name`."""
        return (self.generation, self.step) == (name.generation, name.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The rank of a job that saves, and its generation."""

    job_id: str
    job_uid: str | None
    """None when started by hand: then it owns every checkpoint under the job's id."""
    rank: int
    world_size: int
    generation: int | None  # None when started by hand: one above the newest checkpoint's
    any_world_size: bool = False  # True continues checkpoints of every world size
    restore_from: RestorePoint | None = None  # of a rank of a gang; None: the newest
    inherited_step: StepChoice | None = None  # of what it inherits; None: the newest

    def owns(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint is of this job."""
        if self.job_uid is None:
            return manifest.job_id == self.job_id
        return manifest.job_uid == self.job_uid


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Manifest)


def sign(manifest: Manifest) -> tuple[Manifest, bytes]:
    """Return the manifest with its hash, and its bytes; raises `UnsupportedState`."""
    try:
        unsigned = _ENCODER.encode(manifest)
    except (ValueError, RecursionError) as error:
        raise UnsupportedState(
            f"the values of the state cannot be written as JSON: {error}"
        ) from error
    if len(unsigned) > MANIFEST_LIMIT_BYTES:
        raise UnsupportedState(
            f"the values of the state take {len(unsigned)} bytes as JSON, and the limit is "
            f"{MANIFEST_LIMIT_BYTES}: put large data into numpy arrays"
        )
    signature = xxh3_64_hexdigest(unsigned)
    signed = msgspec.structs.replace(manifest, manifest_xxh3=signature)
    return signed, b'%s%s"}' % (unsigned[:-2], signature.encode())


def decode_manifest(content: bytes | bytearray, where: str) -> Manifest:
    """Return the verified manifest in `content`; raises `CheckpointDamaged`."""
    signature = _SIGNED.search(content, max(0, len(content) - 64))
    if signature is None:
        raise CheckpointDamaged(f"{where} is truncated, or not a manifest")
    start, end = signature.span(1)
    if xxh3_64_hexdigest(content[:start] + content[end:]).encode() != signature[1]:
        raise CheckpointDamaged(f"{where} does not match its own hash")
    try:
        manifest = _DECODER.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not a manifest of this version: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointDamaged(
            f"{where} has format {manifest.format}, and this version reads {FORMAT}"
        )
    if not manifest.files.keys() <= {STATE}:
        raise CheckpointDamaged(f"{where} lists unknown files")
    return manifest
