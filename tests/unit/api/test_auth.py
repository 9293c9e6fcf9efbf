"""Callers are identified by user or token, also while the database is unavailable."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct
from structlog.testing import capture_logs

from api.access.auth import CACHED_SECONDS, Authenticator, TokenCache, Unauthorized, client_network
from api.errors import Problem
from database.engine import Database
from database.tokens import Tokens
from muster.contracts.relay import RelayedClient
from muster.contracts.token import Scope, Token
from tests.support.clocks import ManualClock
from tests.support.database_samples import NOON
from tests.unit.api.token_store import OWN_UID, TEXT, TokenStore, make_authenticator

WRONG = TEXT[:-1] + "0"
ENVIRONMENT = "0123456789abcdef" * 2

AT_NODE = RelayedClient(node_id="n-1", host="desk", user="uid:9")

AWAY: dict[str, Any] = {"is_away": True}


@pytest.fixture
def hand() -> ManualClock[datetime]:
    return ManualClock(NOON)


@pytest.fixture
def tokens() -> TokenStore:
    return TokenStore()


@pytest.fixture
def authenticator(tokens: TokenStore, hand: ManualClock[datetime]) -> Authenticator:
    return make_authenticator(tokens, hand)


def outcome(one: Authenticator, text: str | None = TEXT, uid: int | None = None) -> str:
    """Return the caller and the scope, or the kind of the refusal."""
    header = None if text is None else f"Bearer {text}"
    try:
        found = asyncio.run(one.authenticate(uid, header))
    except Problem as refused:
        return refused.slug
    return f"{found.name} {found.scope}"


@pytest.mark.parametrize(
    ("store", "environment", "text", "uid", "expected"),
    [
        ({}, None, None, OWN_UID, "uid:7 admin"),
        (AWAY, None, None, OWN_UID, "uid:7 admin"),
        ({}, None, None, None, "no-token"),
        (AWAY, None, None, 0, "no-token"),
        ({}, None, None, 8, "no-token"),
        ({}, None, TEXT, 8, "token:ci submit"),
        ({}, None, TEXT, OWN_UID, "token:ci submit"),
        ({}, None, WRONG, OWN_UID, "unknown-token"),
        ({}, TEXT, TEXT, None, "token:ci submit"),
        ({"revoked_at": NOON}, TEXT, TEXT, None, "revoked-token"),
        ({"expires_at": NOON}, TEXT, TEXT, None, "expired-token"),
        (AWAY, ENVIRONMENT, ENVIRONMENT, None, "MUSTER_TOKEN admin"),
        (AWAY, ENVIRONMENT, ENVIRONMENT + "0", None, "unknown-token"),
        (AWAY, ENVIRONMENT, TEXT, None, "store-unavailable"),
    ],
)
def test_a_caller_is_a_user_or_a_token(
    store: dict[str, Any], environment: str | None, text: str | None, uid: int | None, expected: str
) -> None:
    tokens = TokenStore(is_away=store is AWAY)
    tokens.token = replace(tokens.token, **{} if store is AWAY else store)
    assert outcome(make_authenticator(tokens, token=environment), text, uid) == expected


def test_without_a_database_a_token_is_not_called_wrong(
    authenticator: Authenticator, tokens: TokenStore
) -> None:
    tokens.is_away = True
    with pytest.raises(Problem) as refused, capture_logs() as logs:
        asyncio.run(authenticator.authenticate(None, f"Bearer {TEXT}"))
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
    assert "no route" not in refused.value.detail, "the client may be a stranger"
    assert [(log["action"], log["reason"]) for log in logs] == [
        ("token_not_looked_up", "no route to host")
    ]


def test_a_use_that_cannot_be_recorded_is_admitted(
    authenticator: Authenticator, tokens: TokenStore
) -> None:
    tokens.is_read_only = True
    with capture_logs() as logs:
        assert [outcome(authenticator), outcome(authenticator)] == ["token:ci submit"] * 2
    assert [log["action"] for log in logs] == ["token_use_lost"]


def test_a_cached_token_needs_no_database(
    authenticator: Authenticator, tokens: TokenStore, hand: ManualClock[datetime]
) -> None:
    outcome(authenticator)
    tokens.is_cached = tokens.is_away = True
    assert outcome(authenticator) == "token:ci submit"
    assert outcome(authenticator, WRONG) == "store-unavailable"
    assert outcome(authenticator, "mst_") == "unknown-token"
    hand.now += timedelta(minutes=2)  # its use must be recorded again
    assert outcome(authenticator) == "store-unavailable"


def test_a_user_at_a_node_is_known_by_its_id(authenticator: Authenticator) -> None:
    renamed = replace_struct(AT_NODE, host="table")
    first, second = (
        asyncio.run(authenticator.authenticate(each, None)) for each in (AT_NODE, renamed)
    )
    assert (first.name, second.name) == ("uid:9@desk", "uid:9@table")
    assert first.principal == second.principal == "uid:9@n-1"


def test_a_required_token_is_required_of_the_own_user() -> None:
    strict = make_authenticator(TokenStore(), require_token=True)
    refused = []
    for user in (OWN_UID, OWN_UID + 1, AT_NODE, replace_struct(AT_NODE, user=None)):
        assert not strict.is_own_user(user)
        with pytest.raises(Unauthorized) as caught:
            asyncio.run(strict.authenticate(user, None))
        refused.append(caught.value)
    assert [one.slug for one in refused] == ["token-required", "no-token"] * 2
    assert "MUSTER_REQUIRE_TOKEN=0" in refused[0].detail
    assert "MUSTER_REQUIRE_TOKEN" not in refused[1].detail, "settings are not for strangers"


def test_uses_are_recorded_once_a_minute(
    authenticator: Authenticator, tokens: TokenStore, hand: ManualClock[datetime]
) -> None:
    for _ in range(5):
        outcome(authenticator)
        hand.now += timedelta(seconds=30)
    assert tokens.noted == [NOON, NOON + timedelta(minutes=1), NOON + timedelta(minutes=2)]


def test_a_token_is_cached_for_a_second_or_until_it_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = ManualClock(100.0)
    database = Database.open(f"sqlite:///{tmp_path}/muster.db")
    tokens = TokenCache(database, hand)
    token, _ = tokens.create("ci", Scope.READ, lifetime=None, created_by=None)
    assert tokens.find_cached(token.token_id) is None
    assert tokens.find(token.token_id) == tokens.find_cached(token.token_id) == token
    hand.now += CACHED_SECONDS
    assert tokens.find_cached(token.token_id) is None
    assert tokens.find("unknown") is tokens.find_cached("unknown") is None
    find = Tokens.find

    def revoke_meanwhile(itself: Tokens, token_id: str) -> Token | None:
        found = find(itself, token_id)
        tokens.revoke("ci")
        return found

    monkeypatch.setattr(Tokens, "find", revoke_meanwhile)
    tokens.find(token.token_id)
    assert tokens.find_cached(token.token_id) is None
    database.close()


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::1"),
    ],
)
def test_an_ipv6_client_is_its_network(address: str, network: str) -> None:
    assert client_network(address) == network
