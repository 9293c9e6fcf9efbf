"""What a field of a job may hold: types, patterns, limits, and how some of them are checked."""

import re
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

JOB_ID_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
"""Safe as a directory name, an environment value and a URL part: no dot, no slash, no blank."""

JOB_ID_WANTED: Final = "use 1 to 63 letters, digits, '-' or '_', starting with a letter or digit"

RESERVED_IDS: Final = frozenset({"summaries", "purge"})  # names of API paths below /jobs

PROGRAM_WANTED: Final = "file.py:Name or package.module:Name"

ENVIRONMENT_NAME_PATTERN: Final = r"[A-Za-z_][A-Za-z0-9_]{0,127}"

TEXT_LIMIT: Final = 4096  # longest string anywhere in a spec: the longest path Linux takes

COMMAND_LIMIT: Final = 1024  # most words of a command

COMMAND_LIMIT_BYTES: Final = 100_000
"""Limit of all words as JSON: they travel in one variable, and Linux limits one to 128 KiB."""

ENVIRONMENT_LIMIT_BYTES: Final = 500_000
"""Limit of `env` as JSON: with the command it fits into one frame to an agent."""

PYTHON_NAMES: Final = frozenset({"python", "python3"})
"""First words of a command that mean the job's interpreter."""

MAPPING_LIMIT: Final = 256  # most entries of `env` or `labels`

SECONDS_LIMIT: Final = 30 * 24 * 3600.0
"""A month. A longer wait is a typing error."""

SAMPLES_PER_SHARD_MIN: Final = 2
"""A matrix product with a single row uses other instructions, which give other bits."""

INDEPENDENT_BATCH_SIZE: Final = 16
SYNCHRONOUS_BATCH_SIZE: Final = 64

VIRTUAL_SHARDS_OF_SCRIPTS: Final = 8
"""The default of a script that trains with `muster.torch`: each shard is a pass of its own."""

GROUP_LIMIT: Final = 250
"""Most ranks of a synchronous job: they receive their memory as file descriptors, and the kernel
passes at most 253 at once."""

Mode: TypeAlias = Literal["independent", "synchronous"]
"""Each rank has its own model and shards, or all ranks train one model together."""

CheckpointEvery: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000_000)] | Literal["auto"]
"""Steps between checkpoints, or as often as costs little, see `muster.runtime.save_timer`."""

StepChoice: TypeAlias = Annotated[int, Meta(ge=0, le=10**18 - 1)] | Literal["best"]
"""The checkpoint of a step, or the best one by the `keep_best` of its job."""

BackendChoice: TypeAlias = Literal["auto", "shared_memory", "tcp"]
Bits: TypeAlias = Literal["same", "any"]
BitsPromised: TypeAlias = Literal["same", "any", "unchecked"]
"""Those of a job, or `unchecked` if its script does not have its loop checked."""

CodeChoice: TypeAlias = Literal["same", "any", "snapshot"]
RestartScope: TypeAlias = Literal["rank", "gang"]

Megabytes: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 30)]
NODE_NAME_WANTED: Final = "use up to 63 letters, digits, '.', '-' or '_', first a letter or digit"
NodeName: TypeAlias = Annotated[
    str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", extra={"wanted": NODE_NAME_WANTED})
]
"""The name of a machine in the cluster file."""


class KeepBest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By which metric a checkpoint is the best."""

    metric: Annotated[str, Meta(pattern="^.{1,128}$", extra={"wanted": "name a metric"})]
    mode: Literal["min", "max"] = "min"


COMPRESSION_RATIO_MIN: Final = 1e-6


class RandomCompression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of each gradient, some elements by chance. Its text is ``random:RATIO``."""

    kind: Literal["random"]
    ratio: Annotated[float, Meta(ge=COMPRESSION_RATIO_MIN, le=1)]

    def __str__(self) -> str:
        return f"{self.kind}:{self.ratio}"


COMPRESSION_WANTED: Final = (
    "use int8, bf16, fp16 or {kind: random, ratio: 0.1}; top-k, sign and PowerSGD need a residual, "
    "which managed jobs do not keep: they are for muster.collectives"
)
COMPRESSION_PATTERN: Final = "^(int8|bf16|fp16|random:[0-9.e-]{1,25})$"
COMPRESSION_GROUPS: Final = 8
COMPRESSION_GROUPS_LIMIT: Final = 64
"""Of more, int8 would have no level but 0."""


def is_compression(text: str) -> bool:
    """Return whether `text` has the form that ranks are given: a kind, or ``random:RATIO``."""
    if not re.fullmatch(COMPRESSION_PATTERN, text):
        return False
    try:
        return COMPRESSION_RATIO_MIN <= float(text.partition(":")[2] or 1) <= 1
    except ValueError:
        return False


def compression_facts(compression: object, groups: int | None) -> dict[str, str | int]:
    """Return what a checkpoint says of the compression with which it was made; {} for none."""
    if compression is None or groups is None:
        return {}
    return {"compression": f"{compression}", "compression_groups": groups}


class ResumeFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that a job starts from. Its text is ``JOB``, ``JOB:STEP`` or ``JOB:best``."""

    job: Annotated[str, Meta(pattern=f"^{JOB_ID_PATTERN}$", extra={"wanted": JOB_ID_WANTED})]
    step: StepChoice | None = None

    def __str__(self) -> str:
        return self.job if self.step is None else f"{self.job}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> "ResumeFrom":
        """Return what a text means that a spec may hold."""
        job, _, step = text.partition(":")
        return cls(job, int(step) if step.isdecimal() else "best" if step else None)


RESUME_PATTERN: Final = f"^{JOB_ID_PATTERN}(:([0-9]{{1,18}}|best))?$"
RESUME_WANTED: Final = "name a job by its id, and a checkpoint as in JOB:STEP or JOB:best"


def is_program(reference: str) -> bool:
    """Return whether `reference` has the form of `JobSpec.program`."""
    place, _, name = reference.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return name.isidentifier() and (is_module or place.endswith(".py"))


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def fits_shards(batch_size: int, virtual_shards: int) -> bool:
    """Return whether every virtual shard gets the same number of samples, and enough of them."""
    return batch_size % virtual_shards == 0 and batch_size >= SAMPLES_PER_SHARD_MIN * virtual_shards
