"""Tokens are stored as hashes, and pruned a month after they became invalid."""

from datetime import timedelta

import pytest

from database.engine import Database
from database.errors import TokenExists, TokenMissing
from database.tokens import Tokens
from muster.contracts.token import Scope, matches
from tests.support.database_samples import NOON, SteppingClock, everything, nothing_moves


@pytest.fixture
def tokens(database: Database, clock: SteppingClock) -> Tokens:
    return Tokens(database, clock)


def made(tokens: Tokens, name: str, lifetime: timedelta | None = None) -> str:
    return tokens.create(name, Scope.SUBMIT, lifetime=lifetime, created_by="uid:7")[1]


def test_a_token_reads_back_without_its_text(database: Database, tokens: Tokens) -> None:
    token, text = tokens.create("ci", Scope.ADMIN, lifetime=timedelta(hours=1), created_by="uid:7")
    assert tokens.find(token.token_id) == token
    assert tokens.all() == [token]
    assert matches(text, token.sha256)
    assert (token.scope, token.created_by) == (Scope.ADMIN, "uid:7")
    assert token.expires_at == token.created_at + timedelta(hours=1)
    assert tokens.find("0" * 12) is None
    assert text.rpartition("_")[2] not in repr(everything(database))


def test_a_name_is_free_once_its_token_is_revoked(database: Database, tokens: Tokens) -> None:
    made(tokens, "ci")
    with nothing_moves(database), pytest.raises(TokenExists, match="revoke it first"):
        made(tokens, "ci")
    assert tokens.revoke("ci").revoked_at is not None
    for name in ("ci", "none"):
        with nothing_moves(database), pytest.raises(TokenMissing, match="list the tokens"):
            tokens.revoke(name)
    made(tokens, "ci")
    assert [token.revoked_at is None for token in tokens.all()] == [False, True]


def test_invalid_tokens_are_pruned_after_a_month(tokens: Tokens, clock: SteppingClock) -> None:
    made(tokens, "for ever")
    made(tokens, "expires", timedelta(days=1))
    made(tokens, "revoked", timedelta(days=300))
    tokens.revoke("revoked")
    clock.now += timedelta(days=29)
    made(tokens, "later")
    assert len(tokens.all()) == 4
    clock.now += timedelta(days=2)
    made(tokens, "last")
    assert [token.name for token in tokens.all()] == ["for ever", "later", "last"]


def test_only_valid_tokens_of_the_scope_count(tokens: Tokens, clock: SteppingClock) -> None:
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


def test_the_last_use_is_recorded(tokens: Tokens) -> None:
    token, _ = tokens.create("ci", Scope.READ, lifetime=None, created_by=None)
    tokens.note_use(token.token_id, NOON)
    assert tokens.find(token.token_id).last_used_at == NOON
