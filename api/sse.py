"""Server-sent events as they go over the wire."""

from typing import Final

RETRY_MILLISECONDS: Final = 2000
"""How long a reader that has lost us waits before it comes back."""


def beginning(event_id: str) -> bytes:
    """Return what comes first: who loses us before the first event knows where it was to begin."""
    return f"id: {event_id}\nretry: {RETRY_MILLISECONDS}\n\n".encode()


def encoded(event_id: str, text: str, name: str | None = None) -> bytes:
    """Return an event, which has no name if it is lines of logs. `text` has no carriage return."""
    event = "" if name is None else f"event: {name}\n"
    data = text.replace("\n", "\ndata: ")
    return f"id: {event_id}\n{event}data: {data}\n\n".encode()
