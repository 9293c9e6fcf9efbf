"""A token is known for a second after it was found, and not after it was revoked."""

from pathlib import Path

import pytest
from hand import Hand

from api.remembered import FRESH_SECONDS, RememberedTokens
from muster.contracts.token import Scope, Token
from store.database import Database
from store.tokens import Tokens


def test_what_was_found_is_at_hand_until_it_is_old_or_revoked(tmp_path: Path) -> None:
    hand = Hand(100.0)
    database = Database.open(f"sqlite:///{tmp_path}/muster.db")
    tokens = RememberedTokens(database, hand)
    token, _ = tokens.create("ci", Scope.READ, lifetime=None, created_by=None)
    assert tokens.at_hand(token.token_id) is None
    assert tokens.find(token.token_id) == tokens.at_hand(token.token_id) == token
    hand.now += FRESH_SECONDS
    assert tokens.at_hand(token.token_id) is None
    tokens.find(token.token_id)
    tokens.revoke("ci")
    assert tokens.at_hand(token.token_id) is None
    assert tokens.find("nobody") is tokens.at_hand("nobody") is None
    database.close()


def test_what_is_revoked_while_somebody_reads_it_is_not_at_hand_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open(f"sqlite:///{tmp_path}/muster.db")
    tokens = RememberedTokens(database, Hand(100.0))
    token, _ = tokens.create("ci", Scope.READ, lifetime=None, created_by=None)
    read = Tokens.find

    def find_slowly(itself: Tokens, token_id: str) -> Token | None:
        found = read(itself, token_id)
        tokens.revoke("ci")
        return found

    monkeypatch.setattr(Tokens, "find", find_slowly)
    tokens.find(token.token_id)
    assert tokens.at_hand(token.token_id) is None
    database.close()
