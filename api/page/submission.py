"""The submit view: its controls from the schema of a job, and a job's fields as text. Pure."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from muster.contracts.spec import JobRequest, usual_mode

FIELDS: Final = (
    *("job_id", "name", "command", "program", "mode", "world_size", "max_workers", "epochs"),
    *("batch_size", "checkpoint_every", "dataset_dir", "working_dir", "restart_scope"),
    "resume_from",
)
"""Those that people set; the text of the job takes all."""

OF_SCRIPTS: Final = frozenset({"command", "world_size", "max_workers", "virtual_shards"})
"""The command, and fields with other defaults beside it in `muster submit` than over REST."""

_BARE: Final = re.compile(r"(?!(?i:null|true|false)$)[A-Za-z/][\w/.-]*", re.ASCII)
"""Text that means itself in YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What a person fills in for one field."""

    name: str
    kind: str  # text, number, mixed (a number or an option), choice, words
    description: str
    default: str
    options: tuple[str, ...]
    low: int | float | None
    high: int | float | None


def controls() -> Iterator[Control]:
    """Yield the controls of `FIELDS`, as the JSON schema of a job describes them."""
    schema = msgspec.json.schema(JobRequest)["$defs"][JobRequest.__name__]["properties"]
    for name in FIELDS:
        shape = schema[name]
        parts = [it for it in shape.get("anyOf", [shape]) if it.get("type") != "null"]
        options = tuple(word for part in parts for word in part.get("enum", ()))
        number = next((it for it in parts if it.get("type") in {"integer", "number"}), None)
        kind = "words" if parts[0].get("type") == "array" else "choice" if options else "text"
        if number is not None:
            kind = "mixed" if options else "number"
        yield Control(
            name=name,
            kind=kind,
            description=shape["description"],
            default=str(shape["default"] or ""),
            options=options,
            low=(number or {}).get("minimum"),
            high=(number or {}).get("maximum"),
        )


def fields_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to submit for another job like a stored one: what is not a default."""
    command, mode = spec["command"], spec["mode"]
    usual = msgspec.to_builtins(JobRequest(command=command, mode=mode).spec())
    if mode == usual_mode(command):
        usual["mode"] = mode
    else:
        del usual["mode"]
    kept = OF_SCRIPTS if command else {"world_size"}
    found = {name: it for name, it in spec.items() if name in kept or it != usual.get(name)}
    return {name: list(it) if isinstance(it, tuple) else it for name, it in found.items()}


def job_text(fields: Mapping[str, Any]) -> str:
    """Return a job file: YAML, of which JSON is a part."""
    return "".join(f"{name}: {_json(value)}\n" for name, value in fields.items())


def submit_command(fields: Mapping[str, Any]) -> str:
    """Return the command that submits the same."""
    words = ["muster", "submit"]
    for name, value in fields.items():
        is_bare = isinstance(value, str) and _BARE.fullmatch(value)
        words += ["--set", f"{name}={value if is_bare else _json(value)}"]
    return shlex.join(words)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
