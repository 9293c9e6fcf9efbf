"""A job's secrets in the hands of its agent: looked up for each start, and never told."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.contracts.agent import AdoptedRank, AgentAssignment
from muster.contracts.secrets import HELD, LENT, Reference, SecretUnavailable
from muster.processes import environment_of, is_running
from muster.redaction import Redaction
from muster.safe import Safe


class Secrets:
    """The secrets of one job: `references` by variable, `lent` by the name in the reference."""

    def __init__(
        self, references: Mapping[str, Reference], lent: Mapping[str, str], safe: Safe
    ) -> None:
        self._references = references
        self._lent = lent
        self._safe = safe
        self.redaction: Final = Redaction()
        """Of all that a rank may hold: it may be repeated for as long as that runs."""

    @classmethod
    def of(cls, assignment: AgentAssignment) -> "Secrets":
        """Return those of an agent's job; ranks that it adopts may hold them already."""
        parsed = {name: Reference.parse(text) for name, text in assignment.secrets.items()}
        references = {name: found for name, found in parsed.items() if found is not None}
        secrets = cls(references, assignment.lent, Safe(Path(assignment.safe)))
        if references and assignment.adopted:
            secrets.learn(assignment.adopted)
        return secrets

    def learn(self, adopted: Iterable[AdoptedRank]) -> None:
        """Know what these ranks hold: their own variables, and what the references lead to now.

        Neither need be all of it. Of a rank that is gone nobody can read the variables, and a
        reference may lead to nothing any more, or to something else.
        """
        for rank in adopted:
            environment = environment_of(rank.process.pid)
            if is_running(rank.process):
                self.redaction.learn_of_rank(environment)
        for reference in self._references.values():
            with suppress(SecretUnavailable, OSError):
                self._value(reference)

    def variables(self) -> dict[str, str]:
        """Return a rank's variables, and one that names them.

        Raises `SecretUnavailable`, or OSError for want of a look.
        """
        if not self._references:
            return {}
        values = {name: self._value(reference) for name, reference in self._references.items()}
        return {**values, HELD: ",".join(values)}

    def _value(self, reference: Reference) -> str:
        value = self._followed(reference)
        self.redaction.learn([value])
        return value

    def _followed(self, reference: Reference) -> str:
        if reference.source == "file":
            return self._safe.read(reference.name)
        if reference.name not in self._lent:
            raise SecretUnavailable(
                reference,
                "is not lent to jobs. Whoever runs the service sets that variable for it, names it "
                f"in {LENT}, and starts it again",
            )
        return self._lent[reference.name]


NO_SECRETS: Final = Secrets({}, {}, Safe(Path("/")))
"""Of a job that refers to none."""
