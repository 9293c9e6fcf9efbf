"""References to a job's secrets; the secrets themselves are never stored, shown or logged.

A reference is ``env:NAME``, a variable that the service shares with jobs, or ``file:NAME``, a file
in the installation's directory of secrets. The rank's agent resolves it when the rank starts, and
the value goes into that rank's environment only.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from muster.contracts.errors import MusterError

SHARED_VARIABLES: Final = "MUSTER_SECRET_ENV"
"""Names the service's variables that jobs may refer to. A job gets only those it asks for."""

SECRET_VARIABLES: Final = "MUSTER_SECRETS"  # noqa: S105  its name
"""Tells a rank which of its variables are secrets, so that its output can be redacted."""

SECRET_NAME_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"  # noqa: S105  no secret itself
"""Of a file: no slash, no leading dot, nothing that a shell expands."""

SECRET_LIMIT_BYTES: Final = 65_536  # size of one secret: Linux takes no variable over 128 KiB

REFERENCE_WANTED: Final = "file:NAME for a stored secret, or env:NAME for a shared variable"

_REFERENCE: Final = re.compile(rf"(env|file):({SECRET_NAME_PATTERN})", re.ASCII)

_SECRET_LIKE: Final = re.compile(
    r"\w*(?:TOKEN|PASSW(?:OR)?D|PASSPHRASE|SECRET|CREDENTIALS?|_PAT|_KEY|APIKEY)", re.IGNORECASE
)
_WITH_PASSWORD: Final = re.compile(r"\w+://[^/\s:@]*:[^/\s@]+@")  # in a URL


class Reference(NamedTuple):
    """The place of one secret."""

    source: str  # ``env`` or ``file``
    name: str

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Reference | None":
        """Return the reference that `text` is, or None."""
        found = _REFERENCE.fullmatch(text)
        return None if found is None else cls(found[1], found[2])


class SecretUnavailable(MusterError):
    """A referenced secret is missing, or stored insecurely. The message never holds its value."""

    def __init__(self, reference: Reference, why: str) -> None:
        super().__init__(f"the secret {reference} {why}")
        self.reference = reference


def plaintext_secrets(env: Mapping[str, str]) -> list[str]:
    """Return the variables of a job's `env` that hold secrets, by their names or as URLs."""
    return [
        name
        for name, value in env.items()
        if value and (_SECRET_LIKE.fullmatch(name) or _WITH_PASSWORD.match(value))
    ]
