"""Tokens are kept as hashes, and forgotten a month after they have opened anything."""

from datetime import timedelta

import pytest
from store_samples import NOON, SteppingClock, everything, nothing_moves

from muster.contracts.token import Scope, matches
from store.database import Database
from store.errors import TokenExists, TokenMissing
from store.tokens import Tokens


@pytest.fixture
def tokens(database: Database, clock: SteppingClock) -> Tokens:
    return Tokens(database, clock)


def made(tokens: Tokens, name: str, lifetime: timedelta | None = None) -> str:
    return tokens.create(name, Scope.SUBMIT, lifetime=lifetime, created_by="uid:7")[1]


def test_a_token_reads_back_as_it_was_made(tokens: Tokens) -> None:
    token, text = tokens.create("ci", Scope.ADMIN, lifetime=timedelta(hours=1), created_by="uid:7")
    assert tokens.find(token.token_id) == token
    assert tokens.all() == [token]
    assert matches(text, token.sha256)
    assert (token.scope, token.created_by) == (Scope.ADMIN, "uid:7")
    assert token.expires_at == token.created_at + timedelta(hours=1)
    assert tokens.find("0" * 12) is None


def test_the_text_of_a_token_is_nowhere(database: Database, tokens: Tokens) -> None:
    text = made(tokens, "ci")
    kept = repr(everything(database))
    assert text not in kept
    assert text.rpartition("_")[2] not in kept


def test_no_two_tokens_are_alike(tokens: Tokens) -> None:
    assert len({made(tokens, f"{number}") for number in range(20)}) == 20


def test_a_name_is_free_again_once_its_token_is_revoked(database: Database, tokens: Tokens) -> None:
    made(tokens, "ci")
    with nothing_moves(database), pytest.raises(TokenExists, match="revoke it first"):
        made(tokens, "ci")
    revoked = tokens.revoke("ci")
    assert revoked.revoked_at is not None
    made(tokens, "ci")
    assert [token.revoked_at is None for token in tokens.all()] == [False, True]


def test_what_has_opened_nothing_for_a_month_is_forgotten(
    tokens: Tokens, clock: SteppingClock
) -> None:
    made(tokens, "for ever")
    made(tokens, "expires", timedelta(days=1))
    made(tokens, "revoked", timedelta(days=300))
    tokens.revoke("revoked")
    clock.now += timedelta(days=29)
    made(tokens, "later")
    assert len(tokens.all()) == 4
    clock.now += timedelta(days=1)
    made(tokens, "later still")
    assert [token.name for token in tokens.all()] == ["for ever", "expires", "later", "later still"]
    clock.now += timedelta(days=1)
    made(tokens, "expires")
    assert "revoked" not in {token.name for token in tokens.all()}


def test_what_is_not_there_cannot_be_revoked(database: Database, tokens: Tokens) -> None:
    made(tokens, "ci")
    tokens.revoke("ci")
    for name in ("ci", "nobody"):
        with nothing_moves(database), pytest.raises(TokenMissing, match="list the tokens"):
            tokens.revoke(name)


def test_only_what_opens_something_counts(tokens: Tokens, clock: SteppingClock) -> None:
    assert not tokens.is_any_valid()
    made(tokens, "gone")
    tokens.revoke("gone")
    made(tokens, "short", timedelta(minutes=1))
    assert tokens.is_any_valid()
    clock.now += timedelta(hours=1)
    assert not tokens.is_any_valid()
    made(tokens, "lasting")
    assert tokens.is_any_valid()
    assert tokens.is_any_valid(Scope.SUBMIT)
    assert not tokens.is_any_valid(Scope.ADMIN)


def test_the_last_use_is_kept(tokens: Tokens) -> None:
    token, _ = tokens.create("ci", Scope.READ, lifetime=None, created_by=None)
    tokens.note_use(token.token_id, NOON)
    found = tokens.find(token.token_id)
    assert found is not None
    assert found.last_used_at == NOON
