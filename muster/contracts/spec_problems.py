"""What is wrong with a job's description, in the person's words; nobody else judges a field."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from muster.contracts.batches import (
    SAMPLES_PER_SHARD_MIN,
    fits_shards,
    is_power_of_two,
    nearest_batch_size,
)
from muster.contracts.errors import FieldProblem, InvalidSpec
from muster.contracts.job import JobId
from muster.contracts.printable import CONTROLS
from muster.contracts.secrets import REFERENCE_WANTED, Reference
from muster.contracts.spec import (
    COMMAND_LIMIT,
    COMMAND_LIMIT_BYTES,
    ENVIRONMENT_LIMIT_BYTES,
    ENVIRONMENT_NAME_PATTERN,
    GROUP_LIMIT,
    JOB_ID_PATTERN,
    LIMITS,
    MAPPING_LIMIT,
    PROGRAM_WANTED,
    TEXT_LIMIT,
    JobSpec,
    is_program,
)

JOB_ID_WANTED: Final = "use 1 to 63 letters, digits, '-' or '_', starting with a letter or digit"


def checked(spec: JobSpec) -> JobSpec:
    """Return `spec`, or raise `InvalidSpec` with every problem it has."""
    found = list(problems(spec))
    if found:
        raise InvalidSpec(found)
    return spec


def checked_job_id(text: str) -> JobId:
    """Return `text` as a job id, or raise `InvalidSpec`."""
    if not re.fullmatch(JOB_ID_PATTERN, text):
        raise InvalidSpec([FieldProblem("job_id", JOB_ID_WANTED)])
    return JobId(text)


def problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield everything about `spec` that cannot be accepted."""
    yield from _range_problems(spec)
    yield from _pool_problems(spec)
    yield from _text_problems(spec)
    yield from _command_problems(spec)
    yield from _mode_problems(spec)
    yield from _scope_problems(spec)
    yield from _batch_problems(spec)
    yield from _mapping_problems("env", spec.env)
    yield from _mapping_problems("labels", spec.labels)
    yield from _mapping_problems("secrets", spec.secrets)
    yield from _secret_problems(spec)
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
            yield from _terminal_problems(field, value)
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


def _scope_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.restart_scope == "gang" and (spec.command is None or spec.mode != "independent"):
        yield FieldProblem(
            "restart_scope",
            "gang needs a command in mode independent: ranks of ours go on without the one that "
            "died, so leave it out",
        )


def _group_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    field = "world_size" if spec.max_workers is None else "max_workers"
    if spec.largest_world_size > GROUP_LIMIT:
        yield FieldProblem(field, f"more than {GROUP_LIMIT} ranks cannot train one model together")


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
        if field == "labels":
            yield from _terminal_problems(field, name + value)
        if field in {"env", "secrets"} and not re.fullmatch(ENVIRONMENT_NAME_PATTERN, name):
            yield FieldProblem(field, f"{name!r} is not the name of an environment variable")


def _secret_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    for name, text in spec.secrets.items():
        if Reference.parse(text) is None:
            # What was written there may be the secret itself.
            wanted = f"what {name!r} is given is no reference: write {REFERENCE_WANTED}"
            yield FieldProblem("secrets", wanted)
        if name in spec.env:
            yield FieldProblem("secrets", f"{name!r} is in env as well: leave one of them out")


def _string_problems(field: str, value: str) -> Iterator[FieldProblem]:
    if len(value) > TEXT_LIMIT:
        yield FieldProblem(field, f"is longer than {TEXT_LIMIT} characters")
    if "\0" in value:
        yield FieldProblem(field, "holds a NUL character, which no path or process can take")
    if any("\ud800" <= character <= "\udfff" for character in value):
        yield FieldProblem(field, "holds half of a surrogate pair, which is no text")


def _terminal_problems(field: str, value: str) -> Iterator[FieldProblem]:
    """Yield what is wrong with a text that people are shown, beside what is with any text."""
    found = re.search(f"[{CONTROLS}]", value.replace("\0", ""))  # a NUL is told already
    if found:
        yield FieldProblem(
            field, f"holds the control character {found[0]!r}, which a terminal would obey"
        )


def _size_bytes(value: tuple[str, ...] | dict[str, str]) -> int:
    """Return the size as JSON, in which control characters are longer."""
    # Half a surrogate pair has no size of its own; it is told as a problem by itself.
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
