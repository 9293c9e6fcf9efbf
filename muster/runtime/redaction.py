"""Remove secrets from what is reported about ranks.

A rank's log holds whatever the rank prints. But its last lines, error files and messages also go to
events, the database and the API, whose readers may not see secrets.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Self, TypeVar

import msgspec

from muster.contracts.job.secrets import SECRET_VARIABLES
from muster.contracts.messages.agent import AgentMessage, RankExited, RankSaid

REDACTED_LENGTH_MIN: Final = 8
"""Shorter values occur in ordinary words as well."""

REDACTION: Final = "[secret]"

_Message = TypeVar("_Message", bound=AgentMessage)


def held_secrets(environ: Mapping[str, str]) -> list[str]:
    """Return the secrets in a rank's environment, whose names `SECRET_VARIABLES` lists."""
    return [
        environ[name] for name in environ.get(SECRET_VARIABLES, "").split(",") if name in environ
    ]


class Redaction:
    """A set of secrets, kept line by line because messages quote lines."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._lines: list[str] = []
        self.add(values)

    @classmethod
    def of_rank(cls, environ: Mapping[str, str]) -> Self:
        """Return the redaction of a rank with this environment."""
        return cls(held_secrets(environ))

    def add(self, values: Iterable[str]) -> None:
        """Redact these values as well."""
        lines = {line for value in values for line in value.splitlines()}
        longer = {line for line in lines if len(line) >= REDACTED_LENGTH_MIN}
        # Longest first: one secret may contain another.
        self._lines = sorted(longer.union(self._lines), key=len, reverse=True)

    def redact_text(self, text: str) -> str:
        """Return the text without secrets. Cut it only afterwards."""
        for line in self._lines:
            text = text.replace(line, REDACTION)
        return text

    def redact(self, message: _Message) -> _Message:
        """Return the message without secrets."""
        if not self._lines:
            return message
        if isinstance(message, RankExited):
            lines = tuple(map(self.redact_text, message.last_lines))
            error = None if message.error is None else self.redact_text(message.error)
            return msgspec.structs.replace(message, last_lines=lines, error=error)
        if isinstance(message, RankSaid) and (text := getattr(message.message, "message", None)):
            said = msgspec.structs.replace(message.message, message=self.redact_text(text))
            return msgspec.structs.replace(message, message=said)
        return message
