"""The submit view: its controls from the schema of a job, and a job's fields as text. Pure."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from muster.contracts.job.spec import JobRequest

FIELDS: Final = (
    *("job_id", "name", "command", "program", "mode", "world_size", "max_workers", "epochs"),
    *("batch_size", "checkpoint_every", "dataset_dir", "working_dir", "restart_scope"),
    "resume_from",
)
"""Those that people set; the text of the job takes all."""

OF_SCRIPTS: Final = frozenset({"command", "max_workers", "virtual_shards"})
"""The command, and fields with other defaults beside it in `muster submit` than over REST."""

_BARE: Final = re.compile(r"(?!(?i:null|true|false)$)[A-Za-z/][\w/.-]*", re.ASCII)
"""Text that means itself in YAML."""


def controls() -> Iterator[dict[str, Any]]:
    """Yield what a person fills in for each of `FIELDS`, as the JSON schema of a job says."""
    schema = msgspec.json.schema(JobRequest)["$defs"][JobRequest.__name__]["properties"]
    for name in FIELDS:
        parts = schema[name].get("anyOf", [schema[name]])
        kinds = {part.get("type") for part in parts}
        kind = "words" if "array" in kinds else "number" if "integer" in kinds else "text"
        options = [word for part in parts for word in part.get("enum", ())]
        yield {**schema[name], "name": name, "kind": kind, "options": options}


def fields_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to submit for another job like a stored one: what is not a default."""
    usual = JobRequest(command=spec["command"], mode=spec["mode"]).spec()
    kept = {"mode", "world_size"} | (OF_SCRIPTS if spec["command"] else set())
    default = msgspec.to_builtins(usual)
    return {name: value for name, value in spec.items() if name in kept or value != default[name]}


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
    """Return JSON in which every character can be seen: YAML knows this escape as well."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)
