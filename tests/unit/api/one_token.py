"""A store of one token, for whoever tests the door without a database."""

from dataclasses import dataclass, field
from datetime import datetime

from store_samples import NOON

from muster.contracts.token import Scope, Token, id_in, sha256_of
from store.errors import StoreUnavailable

TEXT = f"mst_{'a' * 12}_{'b' * 64}"


def the_token() -> Token:
    return Token(
        token_id=id_in(TEXT) or "",
        name="ci",
        scope=Scope.SUBMIT,
        sha256=sha256_of(TEXT),
        created_at=NOON,
        created_by=None,
        expires_at=None,
    )


@dataclass
class OneToken:
    """May be away, for readers or for writers only."""

    token: Token = field(default_factory=the_token)
    is_away: bool = False
    is_read_only: bool = False
    is_at_hand: bool = False
    noted: list[datetime] = field(default_factory=list)

    def find(self, token_id: str) -> Token | None:
        if self.is_away:
            raise StoreUnavailable("nobody there")
        return self.token if token_id == self.token.token_id else None

    def at_hand(self, token_id: str) -> Token | None:
        return self.token if self.is_at_hand and token_id == self.token.token_id else None

    def note_use(self, _token_id: str, now: datetime) -> None:
        self.noted.append(now)
        if self.is_read_only:
            raise StoreUnavailable("locked")
