"""Refused requests as text, with the answer to each.

A file holds tables, separated by blank lines; each begins with ``# what it shows``::

    # a filter of logs must be valid
    GET /jobs/{job}/logs?since=yesterday            -> 422 invalid-request query.since
    POST /jobs | Origin: null | {"world_size": 1}   -> 403 foreign-origin
    POST /jobs/{job}/pause                          -> 409 not-synchronous "is independent: "

A line has a method and a path, then headers, then a body; without Content-Type, it is JSON. Names
in braces are replaced by what the test prepares. After the arrow stand the status and the kind of
problem, the place of each wrong field with its hint, the allowed methods or what authentication is
needed, and in quotes some words of the sentence.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

from tests.support.api_service import Service

ARROW_COLUMN = 64

_SHOWN_HEADERS = ("Allow", "WWW-Authenticate")
_HEADER = re.compile(r"([A-Za-z-]+): ?(.*)")
_WORDS = re.compile(r' "(.*)"$')


@dataclass(frozen=True)
class Table:
    """Requests of one kind, as they are written."""

    title: str
    lines: list[str]

    def replay(self, service: Service, names: Mapping[str, str]) -> list[str]:
        """Return the lines with what the service answers."""
        return [_replay(line, service, names) for line in self.lines]


def tables(path: Path) -> Iterator[Table]:
    """Yield the tables of a file."""
    for block in path.read_text().strip().split("\n\n"):
        title, *lines = block.splitlines()
        yield Table(title.removeprefix("# "), lines)


def stored(service: Service) -> list[str]:
    """Return all rows of the database, and all files of jobs; not the time of a token's use."""
    with (
        closing(sqlite3.connect(service.files.root / "muster.db")) as database,
        closing(sqlite3.connect(":memory:")) as copy,
    ):
        database.backup(copy)
        copy.execute("UPDATE tokens SET last_used_at = NULL")
        rows = list(copy.iterdump())
    roots = (service.files.root / "jobs", service.root / "checkpoints")
    return rows + sorted(str(path) for root in roots for path in root.rglob("*"))


def _replay(line: str, service: Service, names: Mapping[str, str]) -> str:
    asked, _, expected = line.partition("->")
    words = _WORDS.search(expected)
    filled = re.sub(r"\{(\w+)\}", lambda found: names[found[1]], asked.strip())
    outcome = _outcome(service, filled, words[1] if words else None)
    return f"{asked.strip():<{ARROW_COLUMN - 1}} -> {outcome}"


def _outcome(service: Service, asked: str, words: str | None) -> str:
    request, *parts = asked.split(" | ")
    headers = [found.groups() for part in parts if (found := _HEADER.fullmatch(part))]
    body = "".join(part for part in parts if not _HEADER.fullmatch(part)).encode()
    given = {name.lower() for name, _ in headers}
    defaults = {"Host": "localhost", "Content-Type": "application/json"}
    if body:
        defaults["Content-Length"] = str(len(body))
    headers += [(name, value) for name, value in defaults.items() if name.lower() not in given]
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    # In one piece: a server that refuses the headers may close before it gets the body.
    sent = f"{request} HTTP/1.1\r\nConnection: close\r\n{head}\r\n".encode() + body
    return _shown(service.raw(sent), words)


def _shown(answer: bytes, words: str | None) -> str:
    head, _, content = answer.partition(b"\r\n\r\n")
    first, _, fields = head.partition(b"\r\n")
    status, headers = first.split()[1].decode(), message_from_bytes(fields)
    if not content or headers["Content-Type"] != "application/problem+json":
        return status
    problem = json.loads(content)
    shown = [status, problem["type"].removeprefix("/problems/")]
    for error in problem.get("errors", []):
        shown.append(".".join(map(str, error["loc"])))
        shown += [f"({error['hint']})"] if error["hint"] else []
    shown += [f"({headers[name]})" for name in _SHOWN_HEADERS if headers[name]]
    if words is not None:
        shown.append(f'"{words if words in problem["detail"] else problem["detail"]}"')
    return " ".join(shown)
