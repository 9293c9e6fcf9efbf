"""What is told of ranks, without their secrets.

What a rank prints is in its log, whatever it prints. But its last lines, an error that it has
written down and the words of a program of ours are repeated: in events, in the database and by the
API, to people who may not read secrets. Each value of some length is taken out of them here.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Self, TypeVar

import msgspec

from muster.contracts.messages import (
    AgentMessage,
    Disputed,
    Raised,
    RankExited,
    RankMessage,
    RankSaid,
    Refused,
    Stranded,
    Warned,
)
from muster.contracts.secrets import HELD

REDACTED_LENGTH_MIN: Final = 8
"""What is shorter is found in innocent words as well."""

REDACTION: Final = "[secret]"

Told = TypeVar("Told", bound=AgentMessage)


class Redaction:
    """Knows secrets, line by line, and takes them out of what is told."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._lines: list[str] = []
        self.learn(values)

    @classmethod
    def of_rank(cls, environ: Mapping[str, str]) -> Self:
        """Return that of what a rank holds, from the rank's own environment."""
        redaction = cls()
        redaction.learn_of_rank(environ)
        return redaction

    def learn_of_rank(self, environ: Mapping[str, str]) -> None:
        """Take out as well what a rank with this environment holds."""
        names = environ.get(HELD, "").split(",")
        self.learn(environ[name] for name in names if name in environ)

    def learn(self, values: Iterable[str]) -> None:
        """Take these out as well from now on."""
        lines = {line for value in values for line in value.splitlines()}
        longer = {line for line in lines if len(line) >= REDACTED_LENGTH_MIN}
        # The longest first: another may be a part of it.
        self._lines = sorted(longer.union(self._lines), key=len, reverse=True)

    def without(self, text: str) -> str:
        """Return a text without the secrets that are known; to be cut after that, if at all."""
        for line in self._lines:
            text = text.replace(line, REDACTION)
        return text

    def of(self, told: Told) -> Told:
        """Return what is told, without the secrets that are known."""
        if not self._lines:
            return told
        match told:
            case RankSaid():
                return msgspec.structs.replace(told, message=self._said(told.message))
            case RankExited():
                lines = tuple(map(self.without, told.last_lines))
                error = None if told.error is None else self.without(told.error)
                return msgspec.structs.replace(told, last_lines=lines, error=error)
            case _:
                return told

    def _said(self, message: RankMessage) -> RankMessage:
        match message:
            case Warned() | Refused() | Raised() | Stranded() | Disputed():
                words = self.without(message.message)
                return msgspec.structs.replace(message, message=words)
            case _:
                return message
