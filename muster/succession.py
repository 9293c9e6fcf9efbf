"""Which agent of a job is the present one: that whose socket has the highest number.

A new agent leaves its socket beside those before it, and only then takes them away. So whatever an
old one still does when it wakes up, a frozen machine's perhaps, nobody takes it for the new one.

Whether anybody listens there is not asked: a new agent may be dead by then, or out of reach, and
was one all the same. A socket that never was an agent's is for the coordinator to find out, whose
lease says that nobody else has numbered agents: its next one gets a number that is higher still.
"""

import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"agent\.(\d{4,19})\.sock", re.ASCII)

GENERATION_MAX: Final = 2**62
"""Higher than any that is ever given, and with room in a database for those after it."""


def generation_of(socket: Path) -> int:
    """Return whose socket it is; -1 if its name does not say."""
    found = _NAME.fullmatch(socket.name)
    return int(found[1]) if found else -1


def sockets_beside(socket: Path) -> list[Path]:
    """Return the sockets of all agents that can be in the same directory, that one's included."""
    try:
        paths = socket.parent.iterdir()
        return [path for path in paths if 0 <= generation_of(path) < GENERATION_MAX]
    except OSError:
        return []


def present(socket: Path) -> Path:
    """Return the socket of the present agent: `socket` itself if there is no newer one."""
    return max([socket, *sockets_beside(socket)], key=generation_of)


def newest_generation(socket: Path) -> int:
    """Return the highest number beside that socket, its own included."""
    return generation_of(present(socket))


def is_succeeded(socket: Path) -> bool:
    """Return whether there has been a newer agent than the one of `socket`."""
    return generation_of(present(socket)) > generation_of(socket)
