"""Server-sent events out of bytes. Pure: no socket, no clock.

Only a line feed ends a line: what else Unicode takes for the end of one is text of a log.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: unnamed ones carry lines."""

    name: str
    data: str | None
    """None of one that only says where to go on."""
    id: str | None
    """Where to go on after it."""


def events_of(chunks: Iterable[bytes]) -> Iterator[ServerEvent]:
    """Yield every whole event; one that the stream broke off in is not delivered at all."""
    name, data, last_id, told_id = "", list[str](), None, None
    for line in _lines(chunks):
        if not line:
            if data or last_id != told_id:
                yield ServerEvent(name, "\n".join(data) if data else None, last_id)
            name, data, told_id = "", [], last_id
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "data":
                data.append(value)
            case "event":
                name = value
            case "id":
                last_id = value
            case _:  # a comment, or how soon to come back, which we decide ourselves
                pass


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
