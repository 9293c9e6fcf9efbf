"""What the two ends of a link prove to each other: that both have one secret."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from muster.contracts.errors import AuthenticationFailed

PROOF_BYTES: Final = 32


class Kind(IntEnum):
    """Whose link it is. The caller says it in clear, so no proof is good for another kind."""

    JOB = 1  # a process of a job's host and the coordinator: the digest of an agent's token
    GROUP = 2  # two ranks: the token of their group
    MESH = 3  # two processes of a household: its secret, and a key of each (muster/mesh)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls, and by what both ends prove that they may speak.

    A kind whose ends have keys of their own proves with them, too (`muster.mesh.identity`); the
    secret is then for the keys of the connection.
    """

    kind: Kind
    claim: bytes
    """Who the caller says it is, in clear. The answerer looks the secret up by it."""
    secret: bytes = field(repr=False)
    """Never sent."""
    answer: bytes = b""
    """Who the answerer says it is, in clear."""

    @property
    def proof_bytes(self) -> int:
        return PROOF_BYTES

    def prove(self, role: bytes, said: bytes) -> bytes:
        """Return the proof of one end. `role` keeps the other from sending it back."""
        return hmac.digest(self.secret, role + said, "sha256")

    def check(self, role: bytes, said: bytes, proof: bytes, claim: bytes) -> None:  # noqa: ARG002
        """Raise `AuthenticationFailed` unless the other end, of this claim, made this proof."""
        if not hmac.compare_digest(self.prove(role, said), proof):
            raise AuthenticationFailed(
                "the other end has another token, or none: start both with the same one"
            )


Find: TypeAlias = Callable[[bytes], Identity]
"""Returns the identity that belongs to a claim, or raises an error that says why there is none."""


def job_identity(claim: bytes, token_sha256: str) -> Identity:
    """Return what an agent proves to the coordinator, which keeps only the digest of its token."""
    return Identity(Kind.JOB, claim, bytes.fromhex(token_sha256))
