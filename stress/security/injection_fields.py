"""The places for a text, each with an ordinary text that must be accepted.

A refusal says something about a text only if an ordinary one is accepted there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.listing import encode_cursor
from tests.support.database_samples import NOON

JOB = "precious"
"""Named like the directory that must not be touched."""

STANDING = "standing"
"""The id of a job that runs all the time and is the subject of requests."""

EARLIER = "earlier"
"""The id of a job that has left checkpoints."""

ORDINARY = "ordinary"
"""Also the name of a program, a secret and a variable that there are."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the description of a job."""

    ordinary: str
    body: Callable[[str], Mapping[str, Any]]


def _field(name: str, ordinary: str) -> Place:
    return Place(ordinary, lambda text: {name: text})


def _program(form: str) -> Place:
    return Place(
        ORDINARY,
        lambda text: {"program": form.format(text), "command": None, "mode": "synchronous"},
    )


PLACES: Mapping[str, Place] = {
    "job_id": _field("job_id", ORDINARY),
    "name": _field("name", ORDINARY),
    "mode": _field("mode", "independent"),
    "backend": _field("backend", "tcp"),
    "restart_scope": _field("restart_scope", "gang"),
    "dataset_dir": _field("dataset_dir", "."),
    "working_dir": _field("working_dir", "."),
    "resume_from": _field("resume_from", EARLIER),
    "program": _program("{}:Name"),
    "files of program": _program("{}.py:Name"),
    "checkpoint_dir": Place("kept", lambda text: {"checkpoint_dir": text, "job_id": JOB}),
    "checkpoint_dir, above": Place(
        "kept", lambda text: {"checkpoint_dir": f"{text}/..", "job_id": JOB}
    ),
    "command": Place("true", lambda text: {"command": [text]}),
    "words of command": Place(ORDINARY, lambda text: {"command": ["true", text]}),
    "names in env": Place(ORDINARY, lambda text: {"env": {text: "value"}}),
    "values in env": Place(ORDINARY, lambda text: {"env": {"NAME": text}}),
    "names in labels": Place(ORDINARY, lambda text: {"labels": {text: "value"}}),
    "values in labels": Place(ORDINARY, lambda text: {"labels": {"name": text}}),
    "names in secrets": Place(ORDINARY, lambda text: {"secrets": {text: f"file:{ORDINARY}"}}),
    "secrets": Place(f"env:{ORDINARY}", lambda text: {"secrets": {"NAME": text}}),
    "files of secrets": Place(ORDINARY, lambda text: {"secrets": {"NAME": f"file:{text}"}}),
    "variables of secrets": Place(ORDINARY, lambda text: {"secrets": {"NAME": f"env:{text}"}}),
}
"""Where a text can go in the description of a job."""

_MOMENT = NOON.isoformat()

_QUERIES: Mapping[str, str] = {
    **dict.fromkeys(("limit", "tail", "older_than_days", "older_than_hours"), "10"),
    **dict.fromkeys(("created_after", "created_before", "since", "until"), _MOMENT),
    **dict.fromkeys(("force", "delete_checkpoints", "stop_first", "stop_running"), "false"),
    "follow": "false",
    **dict.fromkeys(("delete_logs", "dry_run"), "true"),
    **dict.fromkeys(("rank", "attempt", "wait"), "0"),
    **dict.fromkeys(("status", "statuses"), "completed"),
    "name": ORDINARY,
    "label": "team:vision",
    "sort": "created_at",
    "names": "loss",
    "points": "10",
    "grep": "line",
    "sweep": "",
    "after": "0.0:0",
    "cursor": encode_cursor((NOON, ORDINARY)),
}

_OF_OTHER_KINDS: Mapping[tuple[str, str], str] = {
    ("/jobs/{job_id}", "until"): "running",
    ("/jobs/{job_id}/events", "after"): "0",
    ("/jobs/{job_id}/watch", "after"): "0",
    ("/jobs/{job_id}/attempts", "cursor"): encode_cursor((NOON, 0, 0)),
}


def ordinary_query(path: str, name: str) -> str:
    """Return a valid value; add new query parameters here."""
    return _OF_OTHER_KINDS.get((path, name)) or _QUERIES[name]
