"""Checks of a job description: each field against its declaration, then fields together."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Final

import msgspec
from msgspec import inspect

from muster.contracts.errors import CONTROLS, FieldProblem, InvalidSpec
from muster.contracts.job.engine import SCHEDULERS
from muster.contracts.job.field_types import (
    COMMAND_LIMIT,
    COMMAND_LIMIT_BYTES,
    COMPRESSION_RATIO_MIN,
    ENVIRONMENT_LIMIT_BYTES,
    ENVIRONMENT_NAME_PATTERN,
    GROUP_LIMIT,
    JOB_ID_PATTERN,
    JOB_ID_WANTED,
    MAPPING_LIMIT,
    PROGRAM_WANTED,
    SAMPLES_PER_SHARD_MIN,
    TEXT_LIMIT,
    fits_shards,
    is_compression,
    is_power_of_two,
    is_program,
)
from muster.contracts.job.limits import LIMITS
from muster.contracts.job.secrets import REFERENCE_WANTED, Reference
from muster.contracts.job.spec import CLUSTER_FIELDS, JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.location import InvalidLocation, parse_location
from muster.contracts.views.service import FieldError

SHOWN_LIMIT: Final = 40  # most characters of a value that an error repeats

OTHER_NAMES: Final = {
    "elastic": "mode: synchronous, virtual_shards: 8 and max_workers: 8",
    "gang": "restart_scope: gang",
    "gpus": "gpus_per_rank: 1",
    **dict.fromkeys(["ranks", "nodes", "nnodes", "nproc_per_node", "replicas"], "world_size: 2"),
    "retries": "max_restarts: 3",
    "script": "command: [python, train.py]",
}
"""Names of options and of other tools, and the field that has the meaning."""

UNSHOWN: Final = "this value"


@cache
def declared_fields(kind: type) -> Mapping[str, inspect.Field]:
    """Return the declared fields of a struct or dataclass, by name."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType | inspect.DataclassType)  # noqa: S101  as `kind`
    return {field.name: field for field in found.fields}


def field_errors(document: object, kind: type) -> Iterator[FieldError]:
    """Yield which fields of a parsed document are missing, unknown, or not as `kind` declares."""
    if not isinstance(document, dict):
        message = f"expected a mapping, got {_shown(document)}"
        yield FieldError(loc=("body",), msg=message, type="dict_type")
        return
    fields = declared_fields(kind)
    for name, field in fields.items():
        if field.required and name not in document:
            yield FieldError(loc=("body", name), msg="is required", type="missing")
    unknown = (name for name in document if name not in fields)
    yield from unknown_names("body", unknown, "there is no such field", fields)
    for name in filter(fields.__contains__, document):
        loc, is_secret = ("body", name), name == "secrets"
        yield from mismatches(document[name], fields[name].type, loc, is_secret=is_secret)


def unknown_names(
    where: str, names: Iterable[str], message: str, known: Collection[str]
) -> Iterator[FieldError]:
    """Yield an error for each name, with the most similar known name."""
    for name in names:
        field = OTHER_NAMES.get(name, "").partition(":")[0]
        hint = f"write {OTHER_NAMES[name]}" if field in known else did_you_mean(name, known)
        yield FieldError(loc=(where, name), msg=message, type="extra_forbidden", hint=hint)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a question with the most similar known name, or None if none is similar."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {str(near[0])!r}?" if near else None


def mismatches(
    value: object, declared: inspect.Type, loc: tuple[str | int, ...], *, is_secret: bool = False
) -> Iterator[FieldError]:
    """Yield where the value at `loc` breaks its declaration. A secret's text is never repeated."""
    shown = UNSHOWN if is_secret else _shown(value)
    declared, wanted, is_optional = _unwrapped(declared, value)
    if value is None and is_optional:
        return
    if isinstance(declared, inspect.StructType):
        for error in field_errors(msgspec.to_builtins(value), declared.cls):
            yield msgspec.structs.replace(error, loc=(*loc, *error.loc[1:]))
    for kind, message in _own_mismatches(value, declared, wanted, shown):
        yield FieldError(loc=loc, msg=message, type=kind)
    if isinstance(declared, inspect.VarTupleType) and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from mismatches(item, declared.item_type, (*loc, index), is_secret=is_secret)
    elif isinstance(declared, inspect.DictType) and isinstance(value, dict):
        for name, item in value.items():
            yield from mismatches(name, declared.key_type, (*loc, name), is_secret=is_secret)
            yield from mismatches(item, declared.value_type, (*loc, name), is_secret=is_secret)


def _unwrapped(declared: inspect.Type, value: object) -> tuple[inspect.Type, str | None, bool]:
    """Return the type without metadata and None, its wording for errors, and whether None fits."""
    wanted, is_optional = None, False
    while isinstance(declared, inspect.Metadata | inspect.UnionType):
        if isinstance(declared, inspect.Metadata):
            wanted = (declared.extra or {}).get("wanted", wanted)
            declared = declared.type
        else:
            is_optional = any(isinstance(one, inspect.NoneType) for one in declared.types)
            kinds = [one for one in declared.types if not isinstance(one, inspect.NoneType)]
            declared = next((one for one in kinds if _is_meant(one, value)), kinds[0])
    return declared, wanted, is_optional


def _is_meant(declared: inspect.Type, value: object) -> bool:
    """Return whether a value is for this member of a union, which is not the first one."""
    if isinstance(declared, inspect.LiteralType):
        return value in declared.values
    return isinstance(declared, inspect.StructType) and isinstance(value, dict | msgspec.Struct)


def _own_mismatches(  # noqa: C901  one case for each kind
    value: object, declared: inspect.Type, wanted: str | None, shown: str
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the value itself: for machines, such as ``int_type``, and a text."""
    match declared:
        case inspect.VarTupleType() if not isinstance(value, list | tuple):
            yield "list_type", f"expected {wanted or 'a list'}, got {shown}"
        case inspect.DictType() if not isinstance(value, dict):
            yield "dict_type", f"expected a mapping NAME: VALUE, got {shown}"
        case inspect.StrType() if not isinstance(value, str):
            quoted = "" if shown == UNSHOWN else f': write "{shown}"'
            yield "string_type", f"expected text, got {shown}{quoted}"
        case inspect.StrType():
            assert isinstance(value, str)  # noqa: S101  as checked above
            yield from _text_mismatches(value, declared, wanted)
        case inspect.IntType() if type(value) is not int:
            yield "int_type", f"expected {wanted or 'an integer'}, got {shown}"
        case inspect.FloatType() if type(value) not in (int, float):
            yield "float_type", f"expected a number, got {shown}"
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high):
            assert isinstance(value, int | float)  # noqa: S101  as checked above
            if low is not None and high is not None and not low <= value <= high:  # NaN is outside
                message = f"{_shown(value)} is not between {low:.15g} and {high:.15g}"
                yield "value_error", message
        case inspect.LiteralType(values=words) if value not in words:
            yield "literal_error", f"expected {' or '.join(map(str, words))}, got {shown}"
        case inspect.EnumType(cls=words) if value not in list(words):
            expected = " or ".join(str(word.value) for word in words)
            yield "literal_error", f"expected {expected}, got {shown}"


def _text_mismatches(
    text: str, declared: inspect.StrType, wanted: str | None
) -> Iterator[tuple[str, str]]:
    if declared.max_length is not None and len(text) > declared.max_length:
        yield "string_too_long", f"is longer than {declared.max_length} characters"
    if any("\ud800" <= character <= "\udfff" for character in text):
        yield "string_unicode", "holds half of a surrogate pair, which is not valid Unicode"
    if declared.pattern is not None and not re.fullmatch(declared.pattern, text):
        yield "string_pattern_mismatch", wanted or f"does not match {declared.pattern}"


def _shown(value: object) -> str:
    """Return a short value as it was written, in ASCII."""
    if not isinstance(value, str | int | float | None):
        return UNSHOWN
    shown = ascii(value) if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= SHOWN_LIMIT else UNSHOWN


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
    for name, field in declared_fields(JobSpec).items():
        value = getattr(spec, name)
        if value is not field.default:
            for found in mismatches(value, field.type, (), is_secret=name == "secrets"):
                yield FieldProblem(name, found.msg)
    yield from _pool_problems(spec)
    yield from _text_problems(spec)
    yield from _command_problems(spec)
    yield from _mode_problems(spec)
    yield from _batch_problems(spec)
    yield from _compression_problems(spec)
    yield from _engine_problems(spec)
    for name in ("env", "labels", "secrets"):
        yield from _mapping_problems(name, getattr(spec, name))
    yield from _secret_problems(spec)
    if _size_bytes(spec.env) > ENVIRONMENT_LIMIT_BYTES:
        yield FieldProblem("env", f"is longer than {ENVIRONMENT_LIMIT_BYTES} bytes as JSON")
    if spec.keep_best is not None and (spec.mode != "synchronous" or spec.command is None):
        yield FieldProblem("keep_best", "needs a script with muster.torch (--elastic)")
    if spec.restart_scope == "gang" and ":" in f"{spec.resume_from}":
        words = "a gang resumes from the newest checkpoint that all ranks have: name the job alone"
        yield FieldProblem("resume_from", words)


def _pool_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    size = spec.world_size
    if spec.min_workers > size:
        yield FieldProblem("min_workers", f"{spec.min_workers} is more than the world size {size}")
    if spec.max_workers is not None and spec.max_workers < size:
        yield FieldProblem("max_workers", f"{spec.max_workers} is less than the world size {size}")
    if spec.mode == "synchronous" and spec.largest_world_size > GROUP_LIMIT:
        field = "world_size" if spec.max_workers is None else "max_workers"
        yield FieldProblem(field, f"more than {GROUP_LIMIT} ranks cannot train one model together")
    if spec.hosts == ():
        yield FieldProblem("hosts", "names no node: leave it out to allow all")


def _text_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    for field in ("name", "dataset_dir", "checkpoint_dir", "working_dir", "program", "python"):
        value = getattr(spec, field)
        if value is not None:
            yield from _string_problems(field, value)
            yield from _terminal_problems(field, value)
            if value == "":
                yield FieldProblem(field, "is empty: leave it out instead")
            if field != "name" and value.startswith("~"):  # of which user, on which machine?
                yield FieldProblem(field, "write the whole path: ~ is replaced by commands only")
            if field in {"dataset_dir", "checkpoint_dir"}:
                try:
                    parse_location(value)
                except InvalidLocation as error:
                    yield FieldProblem(field, str(error))


def _command_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    if spec.command is None:
        if spec.gpus_per_rank:
            yield FieldProblem("gpus_per_rank", "needs a command: other programs use no GPU")
        return
    if not spec.command or not spec.command[0]:
        yield FieldProblem("command", "names no program: give at least one word, or leave it out")
    if len(spec.command) > COMMAND_LIMIT:
        yield FieldProblem("command", f"has more than {COMMAND_LIMIT} words")
    for number, word in enumerate(spec.command, 1):
        yield from _string_problems("command", word, f"word {number} ")
    if _size_bytes(spec.command) > COMMAND_LIMIT_BYTES:
        yield FieldProblem("command", f"is longer than {COMMAND_LIMIT_BYTES} bytes as JSON")


def _mode_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    is_synchronous = spec.mode == "synchronous"
    if is_synchronous and spec.command is not None and spec.program:
        yield FieldProblem("program", "a command has its own loop: leave one of the two out")
    if is_synchronous and spec.program and not is_program(spec.program):
        yield FieldProblem("program", f"use {PROGRAM_WANTED}")
    if not is_synchronous and spec.program:
        yield FieldProblem("program", "needs mode synchronous; put a script into command")
    if not is_synchronous and spec.replay_every is not None:
        yield FieldProblem("replay_every", "needs mode synchronous")
    if spec.bits == "any":
        if not is_synchronous:
            yield FieldProblem("bits", "any needs mode synchronous: other ranks share no numbers")
        if spec.replay_every is not None:
            yield FieldProblem("replay_every", "compares bits: leave it out, or use bits same")
    if spec.restart_scope == "gang" and (spec.command is None or is_synchronous):
        yield FieldProblem(
            "restart_scope",
            "gang needs a command in mode independent: managed ranks go on when one dies",
        )
    if spec.restart_scope == "gang" and spec.checkpoint_every == "auto":
        yield FieldProblem(
            "checkpoint_every",
            "auto is not for a gang, whose ranks must save the same steps: give a number of steps",
        )


def _engine_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    kind = SCHEDULERS.get(spec.engine or "")
    if kind is None:
        if spec.engine_options:
            yield FieldProblem("engine_options", f"needs engine {' or '.join(SCHEDULERS)}")
        return
    for error in field_errors(spec.engine_options, kind):
        where = ".".join(map(str, error.loc[1:]))
        hint = error.hint or f"the options are {', '.join(declared_fields(kind))}"
        hint = f" ({hint})" if error.type == "extra_forbidden" else ""
        yield FieldProblem("engine_options", f"{where}: {error.msg}{hint}")
    for field in CLUSTER_FIELDS:
        if getattr(spec, field) is not None:
            words = f"{spec.engine} chooses the machines: use engine_options instead"
            yield FieldProblem(field, words)


def _batch_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    shards, size = spec.virtual_shards, spec.effective_batch_size
    if not is_power_of_two(shards):
        if shards > 0:  # otherwise it is out of range, which is a problem of its own
            yield FieldProblem("virtual_shards", f"{shards} is not a power of two")
    elif spec.mode == "synchronous" and (problem := batch_size_problem(size, shards)):
        yield FieldProblem("batch_size", f"{spec.batch_size} {problem}")


def _compression_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    groups, is_script = spec.compression_groups, "compression" in spec.left_to_script
    if spec.compression is not None and spec.mode != "synchronous":
        yield FieldProblem("compression", "needs mode synchronous: other ranks share no numbers")
    elif spec.compression is not None and not is_compression(f"{spec.compression}"):
        words = f"{spec.compression} has a ratio that is not between {COMPRESSION_RATIO_MIN} and 1"
        yield FieldProblem("compression", words)
    if not isinstance(groups, int) or not isinstance(spec.virtual_shards, int):
        return
    if spec.compression is None and not is_script:
        yield FieldProblem("compression_groups", "needs compression")
    elif not is_power_of_two(groups) or groups > spec.virtual_shards:
        words = f"{groups} is not a power of two up to virtual_shards ({spec.virtual_shards})"
        yield FieldProblem("compression_groups", words)


def batch_size_problem(batch_size: int, virtual_shards: int) -> str | None:
    """Return why the size does not fit the shards, and which one nearest to it does."""
    if fits_shards(batch_size, virtual_shards):
        return None
    per_shard = (batch_size + virtual_shards // 2) // virtual_shards
    most = int(LIMITS["batch_size"].high) // virtual_shards
    nearest = virtual_shards * min(max(per_shard, SAMPLES_PER_SHARD_MIN), most)
    return (
        f"is not a multiple of virtual_shards ({virtual_shards}) and at least "
        f"{SAMPLES_PER_SHARD_MIN} times as much: {nearest} is the nearest"
    )


def _mapping_problems(field: str, mapping: Mapping[str, str]) -> Iterator[FieldProblem]:
    if len(mapping) > MAPPING_LIMIT:
        yield FieldProblem(field, f"has more than {MAPPING_LIMIT} entries")
    for name, value in mapping.items():
        yield from _string_problems(field, name, "a name ")
        yield from _string_problems(field, value, f"the value of {_shown(name)} ")
        if field == "labels":
            yield from _terminal_problems(field, name + value)
        elif not re.fullmatch(ENVIRONMENT_NAME_PATTERN, name):
            yield FieldProblem(field, f"{_shown(name)}: use up to 128 letters, digits and _")


def _secret_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    for name, text in spec.secrets.items():
        if Reference.parse(text) is None:
            # The value may be the secret itself, so it is not repeated.
            yield FieldProblem(
                "secrets", f"the value of {name!r} is not a reference: write {REFERENCE_WANTED}"
            )
        if name in spec.env:
            yield FieldProblem("secrets", f"{name!r} is in env as well: leave one of them out")


def _string_problems(field: str, value: str, part: str = "") -> Iterator[FieldProblem]:
    """Yield what is wrong with any text, or with a `part` of the field."""
    if len(value) > TEXT_LIMIT:
        yield FieldProblem(field, f"{part}is longer than {TEXT_LIMIT} characters")
    if "\0" in value:
        yield FieldProblem(field, f"{part}holds a NUL character, which no path or process can take")


def _terminal_problems(field: str, value: str) -> Iterator[FieldProblem]:
    """Yield what is wrong with a text that is printed, beside what is wrong with any text."""
    found = re.search(f"[{CONTROLS}]", value.replace("\0", ""))  # NUL is reported already
    if found:
        yield FieldProblem(
            field, f"holds the control character {found[0]!r}, which a terminal would obey"
        )


def _size_bytes(value: tuple[str, ...] | dict[str, str]) -> int:
    """Return the size as JSON, in which control characters are longer."""
    # Half a surrogate pair has no size; it is a problem of its own.
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
