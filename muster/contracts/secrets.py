"""What a job says of its secrets: where each one is kept, and never what it says.

A reference is ``env:NAME``, a variable that whoever runs the service lends to jobs, or
``file:NAME``, a file in the installation's directory of secrets (`muster.safe`). It is followed
when a rank starts, by the rank's agent, and what it leads to goes into that rank's environment
alone: a job is stored, shown and logged with its references.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from muster.contracts.errors import MusterError

LENT: Final = "MUSTER_SECRET_ENV"
"""Names the variables of a service that jobs may ask for. No job gets one without asking."""

HELD: Final = "MUSTER_SECRETS"
"""Tells a rank which of its variables are secrets: what is ours in it does not repeat them."""

SECRET_NAME_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"  # noqa: S105  no secret itself
"""Of a file: no slash, no dot in front, and nothing that a shell would touch."""

SECRET_LIMIT_BYTES: Final = 65_536
"""Of one: Linux takes no variable over 128 KiB."""

REFERENCE_WANTED: Final = "file:NAME of what the service keeps, or env:NAME of what it lends"

_REFERENCE: Final = re.compile(rf"(env|file):({SECRET_NAME_PATTERN})", re.ASCII)

_LOOKS: Final = re.compile(
    r"(?:.*_)?(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)",
    re.IGNORECASE,
)


class Reference(NamedTuple):
    """Where one secret is kept."""

    source: str
    """``env`` or ``file``."""
    name: str

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Reference | None":
        """Return what `text` refers to, or None if it is no reference."""
        found = _REFERENCE.fullmatch(text)
        return None if found is None else cls(found[1], found[2])


class SecretUnavailable(MusterError):
    """A secret is not where a reference says, or not kept as one: says which, and never what."""

    def __init__(self, reference: Reference, why: str) -> None:
        super().__init__(f"the secret {reference} {why}")
        self.reference = reference


def secrets_in_the_clear(env: Mapping[str, str]) -> list[str]:
    """Return which variables of a job's `env` are secrets, to judge by their names."""
    return [name for name, value in env.items() if value and _LOOKS.fullmatch(name)]
