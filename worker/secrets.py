"""A job's secrets in the hands of its agent: looked up for each start, kept out of what is told.

What a rank prints is in its log, whatever it prints. But its last lines, an error that it has
written down and the words of a program of ours are repeated: in events, in the database and by the
API, to people who may not read secrets. Each value of some length is taken out of them here.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from muster.contracts.agent import AgentAssignment
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
from muster.contracts.secrets import LENT, Reference, SecretUnavailable
from muster.safe import Safe

REDACTED_LENGTH_MIN: Final = 8
"""What is shorter is found in innocent words as well."""

REDACTION: Final = "[secret]"

Told = TypeVar("Told", bound=AgentMessage)


class Secrets:
    """The secrets of one job: `references` by variable, `lent` by the name in the reference."""

    def __init__(
        self, references: Mapping[str, Reference], lent: Mapping[str, str], safe: Safe
    ) -> None:
        self._references = references
        self._lent = lent
        self._safe = safe
        self._known: set[str] = set()
        """All that a rank may hold, line by line: it may be repeated for as long as that runs."""

    @classmethod
    def of(cls, assignment: AgentAssignment) -> "Secrets":
        """Return those of an agent's job; ranks that it adopts may hold them already."""
        parsed = {name: Reference.parse(text) for name, text in assignment.secrets.items()}
        references = {name: found for name, found in parsed.items() if found is not None}
        secrets = cls(references, assignment.lent, Safe(Path(assignment.safe)))
        if assignment.adopted:
            with suppress(SecretUnavailable, OSError):
                secrets.resolved()
        return secrets

    def resolved(self) -> dict[str, str]:
        """Return a rank's variables; raises `SecretUnavailable`, or OSError for want of a look."""
        values = {name: self._value(reference) for name, reference in self._references.items()}
        lines = (line for value in values.values() for line in value.splitlines())
        self._known.update(line for line in lines if len(line) >= REDACTED_LENGTH_MIN)
        return values

    def redacted(self, told: Told) -> Told:
        """Return what is told, without the secrets that are known."""
        if not self._known:
            return told
        match told:
            case RankSaid():
                return msgspec.structs.replace(told, message=self._said(told.message))
            case RankExited():
                lines = tuple(map(self._without, told.last_lines))
                error = None if told.error is None else self._without(told.error)
                return msgspec.structs.replace(told, last_lines=lines, error=error)
            case _:
                return told

    def _value(self, reference: Reference) -> str:
        if reference.source == "file":
            return self._safe.read(reference.name)
        if reference.name not in self._lent:
            raise SecretUnavailable(
                reference,
                "is not lent to jobs. Whoever runs the service sets that variable for it, names it "
                f"in {LENT}, and starts it again",
            )
        return self._lent[reference.name]

    def _said(self, message: RankMessage) -> RankMessage:
        match message:
            case Warned() | Refused() | Raised() | Stranded() | Disputed():
                words = self._without(message.message)
                return msgspec.structs.replace(message, message=words)
            case _:
                return message

    def _without(self, text: str) -> str:
        # The longest first: another may be a part of it.
        for line in sorted(self._known, key=len, reverse=True):
            text = text.replace(line, REDACTION)
        return text


NO_SECRETS: Final = Secrets({}, {}, Safe(Path("/")))
"""Of a job that refers to none."""
