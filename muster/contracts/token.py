"""What a token is: a name, a scope, and a secret of which only the hash is kept.

As text it is ``mst_<id>_<secret>``. The id is no secret: a token is looked up by it, so that the
comparison of the secret can take the same time whatever is compared.
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
"""256 bits: nobody guesses one, so that a fast hash of it is as good as a slow one."""

NAME_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_WANTED: Final = "use 1 to 63 letters, digits, '.', '-' or '_', starting with a letter or digit"

SECONDS_LIMIT: Final = 10 * 366 * 86400
"""A token for longer is one that does not expire."""

WAY_TO_ADMIN: Final = (
    "shut what brings others in as that user (a proxy, a tunnel), and make one while the service "
    "asks for none: muster down; "
    "MUSTER_REQUIRE_TOKEN=0 muster up -d; muster token create NAME --scope admin; muster down; "
    "muster up -d"
)
"""What to type where MUSTER_REQUIRE_TOKEN is set, and a token of scope admin takes another."""

_TEXT: Final = re.compile(
    rf"mst_(?P<id>[0-9a-f]{{{2 * ID_BYTES}}})_[0-9a-f]{{{2 * SECRET_BYTES}}}", re.ASCII
)


class Scope(StrEnum):
    """What a caller may do; each scope covers those before it."""

    READ = "read"
    """Look at everything: jobs, logs, checkpoints."""
    SUBMIT = "submit"
    """Create, change, end and delete jobs, which is to run commands as the service's user."""
    ADMIN = "admin"
    """Make and revoke tokens."""

    def covers(self, needed: "Scope") -> bool:
        """Whether whoever has this scope may do what needs the other."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as it is kept. Its text is known to whoever it was given to, and to nobody else."""

    token_id: str
    name: str
    scope: Scope
    sha256: str = field(repr=False)
    """Of the whole text."""
    created_at: datetime
    created_by: str | None
    expires_at: datetime | None
    """None: never."""
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    """To the minute."""

    def is_valid(self, now: datetime) -> bool:
        """Whether it opens anything at `now`."""
        return self.revoked_at is None and not self.is_expired(now)

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def new_text(random_bytes: Callable[[int], bytes]) -> str:
    """Return the text of a token that there has never been."""
    return f"mst_{random_bytes(ID_BYTES).hex()}_{random_bytes(SECRET_BYTES).hex()}"


def id_in(text: str) -> str | None:
    """Return the id in a token's text, None for what is no token of ours."""
    found = _TEXT.fullmatch(text)
    return found["id"] if found else None


def sha256_of(text: str) -> str:
    """Return what is kept of a token's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def matches(text: str, sha256: str) -> bool:
    """Whether `sha256` is that of `text`; takes as long for a near miss as for a far one."""
    return hmac.compare_digest(sha256_of(text), sha256)
