"""The root of the error tree, and the errors of the contracts.

MusterError
├── IllegalMove            a state machine was asked for a move its table does not have
├── InvalidSpec            a job description that cannot be accepted
├── InvalidDescription     a job file or a cluster file cannot be used
├── InvalidEnvironment     an environment variable with an unusable value
├── JobDiffers             an unfinished job was resumed with another description
├── WireError              a peer sent an invalid frame or message
├── AuthenticationFailed   the other end of a link is not who it says, or another was in between
├── InvalidLocation        muster/contracts/location.py
├── SecretUnavailable      muster/contracts/job/secrets.py
├── PoolError              muster/contracts/pool.py
├── NoSecret               muster/mesh/secret.py
├── ObjectStoreError …     muster/objects/errors.py
├── CheckpointError …      muster/checkpoints/errors.py
├── CollectiveError …      muster/collectives/errors.py
└── DatasetError …         muster/datasets/errors.py

A message says what failed, why, and what to do next.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

CONTROLS: Final = r"\x00-\x1f\x7f-\x9f"
"""Control characters, for the brackets of a pattern. Some terminals take 0x80 to 0x9f for ESC and
a letter."""

State = TypeVar("State", bound=Enum)


def printable(text: str) -> str:
    r"""Return `text` with unprintable characters escaped, such as ``\x1b``; newlines stay."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One invalid field, and a sentence that says why."""

    field: str
    message: str


class MusterError(Exception):
    """Base class of every expected error. Any other exception is a bug."""


class IllegalMove(MusterError):
    """The table does not allow the move from `current` to `target`."""

    def __init__(self, current: Enum, target: Enum) -> None:
        super().__init__(
            f"{type(current).__name__} cannot move from {current.value} to {target.value}"
        )
        self.current = current
        self.target = target


def move(transitions: Mapping[State, Collection[State]], current: State, target: State) -> State:
    """Return `target`, or raise `IllegalMove` if the table does not allow it."""
    if target not in transitions[current]:
        raise IllegalMove(current, target)
    return target


class InvalidSpec(MusterError):
    """A job description with one or more fields that cannot be accepted."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.message}" for problem in problems))
        self.problems = tuple(problems)


class InvalidDescription(MusterError):
    """A job file or a cluster file, or what is in it. Names line and node, if known."""


class InvalidEnvironment(MusterError):
    """An environment variable with a value that cannot be used."""

    def __init__(
        self,
        name: str,
        value: str,
        wanted: str,
        way: str = "correct it in the environment or unset it",
    ) -> None:
        super().__init__(f"{name}={value!r} is not {wanted}: {way}")
        self.name = name
        self.value = value
        """The value, or "…" if it may be secret."""
        self.wanted = wanted


class JobDiffers(MusterError):
    """An unfinished job of the same id has another description."""

    def __init__(self, job_id: str, fields: Sequence[str]) -> None:
        super().__init__(
            f"{job_id} was started with another {', '.join(fields)} and is not finished: use the "
            "same values to resume it, or choose another id"
        )
        self.fields = tuple(fields)


class WireError(MusterError):
    """A peer sent an invalid frame or message."""


class AuthenticationFailed(MusterError):
    """The other end of a connection has not proved itself, or a message was changed; close it."""
