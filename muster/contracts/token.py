"""API tokens: a name, a scope, and a secret of which only the hash is kept.

As text a token is ``mst_<id>_<secret>``. The id is not secret: the database looks a token up by
it, so the comparison of the secret can take constant time.
"""

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
"""256 random bits cannot be guessed, so a fast hash is as good as a slow one."""

NAME_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_WANTED: Final = "use 1 to 63 letters, digits, '.', '-' or '_', starting with a letter or digit"

SECONDS_LIMIT: Final = 10 * 366 * 86400  # longest lifetime of a token that expires

WAY_TO_ADMIN: Final = (
    "stop every proxy or tunnel that connects as the service's user, then create a token while the "
    "service requires none: muster down; MUSTER_REQUIRE_TOKEN=0 muster up -d; "
    "muster token create NAME --scope admin; muster down; muster up -d"
)
"""How to create the first token of scope admin where MUSTER_REQUIRE_TOKEN is set."""

_TEXT: Final = re.compile(
    rf"mst_(?P<id>[0-9a-f]{{{2 * ID_BYTES}}})_[0-9a-f]{{{2 * SECRET_BYTES}}}", re.ASCII
)


class Scope(StrEnum):
    """What a caller may do; each scope includes those before it."""

    READ = "read"  # read everything: jobs, logs, checkpoints
    SUBMIT = "submit"
    """Create, change, stop and delete jobs, which means running commands as the service's user."""
    ADMIN = "admin"  # create and revoke tokens

    def covers(self, needed: "Scope") -> bool:
        """Return whether this scope includes `needed`."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as it is stored. Only the user it was given to knows its text."""

    token_id: str
    name: str
    scope: Scope
    sha256: str = field(repr=False)  # of the whole text
    created_at: datetime
    created_by: str | None
    expires_at: datetime | None  # None: never
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None  # to the minute

    def is_valid(self, now: datetime) -> bool:
        """Return whether it is accepted at `now`."""
        return self.revoked_at is None and not self.is_expired(now)

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def new_text(random_bytes: Callable[[int], bytes]) -> str:
    """Return the text of a new token."""
    return f"mst_{random_bytes(ID_BYTES).hex()}_{random_bytes(SECRET_BYTES).hex()}"


def id_in(text: str) -> str | None:
    """Return the id in a token's text, or None if it is not a token of Muster."""
    found = _TEXT.fullmatch(text)
    return found["id"] if found else None


def masked(text: str) -> str:
    """Return `text` with every token in it replaced: by mistake one may be part of a path."""
    return re.sub(rf"mst_[0-9a-f]{{{2 * ID_BYTES}}}_[0-9a-f]+", "mst_[secret]", text)


def sha256_of(text: str) -> str:
    """Return the hash that is stored of a token's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def matches(text: str, sha256: str) -> bool:
    """Return whether `sha256` is the hash of `text`, in constant time."""
    return hmac.compare_digest(sha256_of(text), sha256)
