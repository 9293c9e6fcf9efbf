"""What a person asks for: the description of a job, its defaults and its limits.

One frozen value, the same over REST, in the database, on the wire and from the environment.
`problems` says what is wrong with it in the person's words; nobody else judges a field.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from muster.contracts.batches import (
    SAMPLES_PER_SHARD_MIN,
    fits_shards,
    is_power_of_two,
    nearest_batch_size,
)
from muster.contracts.errors import FieldProblem, InvalidSpec
from muster.contracts.job import JobId

JOB_ID_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
"""Safe as a directory name, an environment value and a URL part: no dot, no slash, no blank."""

PROGRAM_WANTED: Final = "file.py:Name or package.module:Name"

ENVIRONMENT_NAME_PATTERN: Final = r"[A-Za-z_][A-Za-z0-9_]{0,127}"

TEXT_LIMIT: Final = 4096
"""Longest string anywhere in a spec: the longest path Linux takes."""

COMMAND_LIMIT: Final = 1024
"""Most words of a command."""

COMMAND_LIMIT_BYTES: Final = 100_000
"""Of all its words as JSON: they travel in one variable, and Linux takes no entry over 128 KiB."""

ENVIRONMENT_LIMIT_BYTES: Final = 500_000
"""Of `env` as JSON: with the command it fits into one frame to an agent."""

MAPPING_LIMIT: Final = 256
"""Most entries of `env` or `labels`."""

SECONDS_LIMIT: Final = 30 * 24 * 3600.0
"""A month. Longer waits are typing errors."""


Mode: TypeAlias = Literal["independent", "synchronous"]
"""Each rank has a model and shards of its own, or all ranks hold one model together."""

BackendChoice: TypeAlias = Literal["auto", "shared_memory", "tcp"]
"""How the ranks of a synchronous job talk; auto: shared memory where all are on one host."""

INDEPENDENT_BATCH_SIZE: Final = 16
SYNCHRONOUS_BATCH_SIZE: Final = 64


GROUP_LIMIT: Final = 250
"""Most ranks of a synchronous job: their memory is handed over as descriptors, and the kernel takes
253 at once."""


class Range(msgspec.Struct, frozen=True):
    """Inclusive limits of a number."""

    low: float
    high: float


LIMITS: Final[Mapping[str, Range]] = {
    "world_size": Range(1, 4096),
    "min_workers": Range(1, 4096),
    "max_workers": Range(1, 4096),
    "epochs": Range(1, 1_000_000),
    "virtual_shards": Range(1, 4096),
    "batch_size": Range(1, 1_000_000),
    "replay_every": Range(1, 4096),
    "seed": Range(0, 2**63 - 1),
    "checkpoint_every": Range(1, 1_000_000_000),
    "keep_last": Range(1, 10_000),
    "sleep_sec": Range(0, 3600),
    "max_restarts": Range(0, 1_000_000),
    "heartbeat_timeout": Range(1, SECONDS_LIMIT),
    "start_grace_seconds": Range(1, SECONDS_LIMIT),
    "stop_grace_seconds": Range(0, SECONDS_LIMIT),
    "progress_timeout_seconds": Range(1, SECONDS_LIMIT),
}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that was asked for. ``JobSpec()`` is a job of four ranks with all defaults."""

    name: str | None = None
    mode: Mode = "independent"
    world_size: int = 4
    min_workers: int = 1
    max_workers: int | None = None
    """None: the world size at the start."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int | None = None
    """Samples of a step; in independent mode those of one rank. None: `effective_batch_size`."""
    virtual_shards: int = 32
    """Equal parts of every batch of a synchronous job; a power of two. With the batch size it
    decides the bits of the result, which the number of ranks never does."""
    backend: BackendChoice = "auto"
    replay_every: int | None = None
    """One virtual shard in this many is computed by a second rank as well, and compared."""
    seed: int = 0
    checkpoint_every: int = 5
    """Steps between checkpoints."""
    keep_last: int = 3
    """Checkpoints kept per rank."""
    sleep_sec: float = 0.0
    """Pause after each step of a training of ours, for demonstrations."""
    dataset_dir: str | None = None
    """None: the default place, or a small synthetic data set where there is none."""
    checkpoint_dir: str | None = None
    """None: the server's default."""
    command: tuple[str, ...] | None = None
    """The argv every rank becomes. None: a training of ours, see `program`."""
    program: str | None = None
    """What a synchronous job trains: ``file.py:Name`` or ``package.module:Name``. None: the
    built-in classifier."""
    env: dict[str, str] = {}
    working_dir: str | None = None
    heartbeat_timeout: float = 10.0
    """Seconds without a heartbeat after which a rank that beats is killed and replaced."""
    start_grace_seconds: float = 120.0
    """Seconds a rank may take from its start to its first sign of life."""
    stop_grace_seconds: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    progress_timeout_seconds: float | None = None
    """Seconds without a new step after which a beating rank is replaced. None: never."""
    max_restarts: int = 50
    """Restarts of one rank, after which the job fails."""
    resume_from: str | None = None
    """The id of the job whose checkpoints this one starts from; its own id to go on."""
    labels: dict[str, str] = {}

    @property
    def effective_batch_size(self) -> int:
        """The samples of a step: what was asked for, or what the mode makes of it."""
        if self.batch_size is not None:
            return self.batch_size
        if self.mode == "independent":
            return INDEPENDENT_BATCH_SIZE
        return max(SYNCHRONOUS_BATCH_SIZE, SAMPLES_PER_SHARD_MIN * self.virtual_shards)

    @property
    def effective_backend(self) -> str:
        """How ranks of this job talk: through shared memory, as they are on one host."""
        return "shared_memory" if self.backend == "auto" else self.backend

    @property
    def largest_world_size(self) -> int:
        """The most ranks the job may ever have; an independent one keeps its number."""
        if self.mode == "independent" or self.max_workers is None:
            return self.world_size
        return self.max_workers


def usual_mode(command: Sequence[str] | None) -> Mode:
    """Return the mode of a job that names none: a command is a program that we do not manage."""
    return "synchronous" if command is None else "independent"


def checked(spec: JobSpec) -> JobSpec:
    """Return `spec`, or raise `InvalidSpec` with every problem it has."""
    found = list(problems(spec))
    if found:
        raise InvalidSpec(found)
    return spec


def checked_job_id(text: str) -> JobId:
    """Return `text` as a job id, or raise `InvalidSpec`."""
    if not re.fullmatch(JOB_ID_PATTERN, text):
        raise InvalidSpec(
            [
                FieldProblem(
                    "job_id",
                    "use 1 to 63 letters, digits, '-' or '_', starting with a letter or digit",
                )
            ]
        )
    return JobId(text)


def problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield everything about `spec` that cannot be accepted."""
    yield from _range_problems(spec)
    yield from _pool_problems(spec)
    yield from _text_problems(spec)
    yield from _command_problems(spec)
    yield from _mode_problems(spec)
    yield from _batch_problems(spec)
    yield from _mapping_problems("env", spec.env)
    yield from _mapping_problems("labels", spec.labels)
    if _size_bytes(spec.env) > ENVIRONMENT_LIMIT_BYTES:
        yield FieldProblem("env", f"is longer than {ENVIRONMENT_LIMIT_BYTES} bytes as JSON")
    if spec.resume_from is not None and not re.fullmatch(JOB_ID_PATTERN, spec.resume_from):
        yield FieldProblem("resume_from", "name a job by its id")


def _range_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    for field, limits in LIMITS.items():
        value = getattr(spec, field)
        if value is None:
            continue
        if not limits.low <= value <= limits.high:  # NaN is not, either
            yield FieldProblem(field, f"{value} is not between {limits.low:g} and {limits.high:g}")


def _pool_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.min_workers > spec.world_size:
        yield FieldProblem(
            "min_workers", f"{spec.min_workers} is more than the world size {spec.world_size}"
        )
    if spec.max_workers is not None and spec.max_workers < spec.world_size:
        yield FieldProblem(
            "max_workers", f"{spec.max_workers} is less than the world size {spec.world_size}"
        )


def _text_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    for field in ("name", "dataset_dir", "checkpoint_dir", "working_dir", "program"):
        value = getattr(spec, field)
        if value is not None:
            yield from _string_problems(field, value)
            if value == "":
                yield FieldProblem(field, "is empty: leave it out instead")


def _command_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.command is None:
        return
    if not spec.command or not spec.command[0]:
        yield FieldProblem("command", "names no program: give at least one word, or leave it out")
    if len(spec.command) > COMMAND_LIMIT:
        yield FieldProblem("command", f"has more than {COMMAND_LIMIT} words")
    for word in spec.command:
        yield from _string_problems("command", word)
    if _size_bytes(spec.command) > COMMAND_LIMIT_BYTES:
        yield FieldProblem("command", f"is longer than {COMMAND_LIMIT_BYTES} bytes as JSON")


def _mode_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.mode == "synchronous":
        if spec.command is not None:
            yield FieldProblem(
                "command",
                "ranks of a synchronous job are managed: name a program, or use mode independent",
            )
        if spec.program and not is_program(spec.program):
            yield FieldProblem("program", f"use {PROGRAM_WANTED}")
        yield from _group_problems(spec)
        return
    if spec.program:
        yield FieldProblem("program", "needs mode synchronous; a script goes into command")
    if spec.replay_every is not None:
        yield FieldProblem("replay_every", "needs mode synchronous")


def _group_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    field = "world_size" if spec.max_workers is None else "max_workers"
    if spec.largest_world_size > GROUP_LIMIT:
        yield FieldProblem(field, f"more than {GROUP_LIMIT} ranks cannot train one model together")


def is_program(reference: str) -> bool:
    """Return whether `reference` has the form of `JobSpec.program`."""
    place, _, name = reference.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return name.isidentifier() and (is_module or place.endswith(".py"))


def _batch_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    shards = spec.virtual_shards
    if not is_power_of_two(shards):
        # Out of its range is a problem told elsewhere.
        if shards > 0:
            yield FieldProblem("virtual_shards", f"{shards} is not a power of two")
    elif spec.mode == "synchronous" and not fits_shards(spec.effective_batch_size, shards):
        most = int(LIMITS["batch_size"].high)
        nearest = nearest_batch_size(spec.effective_batch_size, shards, most)
        yield FieldProblem(
            "batch_size",
            f"{spec.batch_size} is not a multiple of virtual_shards ({shards}) and at least "
            f"{SAMPLES_PER_SHARD_MIN} times as much: {nearest} is the nearest",
        )


def _mapping_problems(field: str, mapping: Mapping[str, str]) -> Iterator[FieldProblem]:
    if len(mapping) > MAPPING_LIMIT:
        yield FieldProblem(field, f"has more than {MAPPING_LIMIT} entries")
    for name, value in mapping.items():
        yield from _string_problems(field, name)
        yield from _string_problems(field, value)
        if field == "env" and not re.fullmatch(ENVIRONMENT_NAME_PATTERN, name):
            yield FieldProblem(field, f"{name!r} is not the name of an environment variable")


def _string_problems(field: str, value: str) -> Iterator[FieldProblem]:
    if len(value) > TEXT_LIMIT:
        yield FieldProblem(field, f"is longer than {TEXT_LIMIT} characters")
    if "\0" in value:
        yield FieldProblem(field, "holds a NUL character, which no path or process can take")
    if any("\ud800" <= character <= "\udfff" for character in value):
        yield FieldProblem(field, "holds half of a surrogate pair, which is no text")


def _size_bytes(value: tuple[str, ...] | dict[str, str]) -> int:
    """Return the size as JSON, in which control characters are longer."""
    # Half a surrogate pair has no size of its own; it is told as a problem by itself.
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
