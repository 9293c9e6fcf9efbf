"""Which agent of a job is the current one: the one whose socket has the highest number.

A new agent creates its socket first and only then removes older ones. So an old agent, for example
on a machine that was suspended, can always see that it has been replaced. The check does not
connect: a newer agent may be dead or out of reach and has still taken over.
"""

import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"agent\.(\d{4,})\.sock", re.ASCII)


def number_of(socket: Path) -> int:
    """Return the agent's number in a socket's name; -1 if it has none."""
    found = _NAME.fullmatch(socket.name)
    return int(found[1]) if found else -1


def sockets_beside(socket: Path) -> list[Path]:
    """Return all agent sockets in the directory of `socket`."""
    try:
        return [path for path in socket.parent.iterdir() if number_of(path) >= 0]
    except OSError:
        return []


def newest_socket(socket: Path) -> Path:
    """Return the socket of the current agent, `socket` itself if none is newer."""
    return max([socket, *sockets_beside(socket)], key=number_of)


def newest_number(socket: Path) -> int:
    """Return the highest number in the directory of `socket`, its own included."""
    return number_of(newest_socket(socket))


def is_replaced(socket: Path) -> bool:
    """Return whether a newer agent than that of `socket` has started."""
    return newest_number(socket) > number_of(socket)
