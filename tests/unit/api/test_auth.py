"""Callers are identified by user or token, also while the database is unavailable."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from api.auth import CACHED_SECONDS, Authenticator, TokenCache, Unauthorized, client_network
from api.errors import Problem
from database.engine import Database
from database.tokens import Tokens
from muster.contracts.token import Scope, Token, sha256_of
from tests.support.clocks import ManualClock
from tests.support.database_samples import NOON
from tests.unit.api.token_store import TEXT, TokenStore

OWN_UID = 7
WRONG = TEXT[:-1] + "0"


@pytest.fixture
def hand() -> ManualClock[datetime]:
    return ManualClock(NOON)


@pytest.fixture
def tokens() -> TokenStore:
    return TokenStore()


@pytest.fixture
def authenticator(tokens: TokenStore, hand: ManualClock[datetime]) -> Authenticator:
    return Authenticator(
        tokens, hand, own_uid=OWN_UID, require_token=False, token_sha256=sha256_of(TEXT)
    )


def caller(one: Authenticator, text: str | None = TEXT, uid: int | None = None) -> str:
    header = None if text is None else f"Bearer {text}"
    found = asyncio.run(one.authenticate(uid, header))
    return f"{found.name} {found.scope}"


def test_the_own_user_needs_no_token_and_no_database(
    authenticator: Authenticator, tokens: TokenStore
) -> None:
    tokens.is_away = True
    assert caller(authenticator, None, OWN_UID) == "uid:7 admin"
    for uid in (None, 0, 8):
        with pytest.raises(Unauthorized) as refused:
            caller(authenticator, None, uid)
        assert refused.value.slug == "no-token"


def test_a_wrong_token_is_refused_from_the_own_user_too(authenticator: Authenticator) -> None:
    with pytest.raises(Unauthorized) as refused:
        caller(authenticator, WRONG, OWN_UID)
    assert refused.value.slug == "unknown-token"


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"revoked_at": NOON}, "revoked-token"),
        ({"expires_at": NOON}, "expired-token"),
    ],
)
def test_a_stored_token_wins_over_the_environment(
    authenticator: Authenticator, tokens: TokenStore, change: dict[str, datetime], slug: str
) -> None:
    assert caller(authenticator) == "token:ci submit", "MUSTER_TOKEN is the same text"
    tokens.token = replace(tokens.token, **change)
    with pytest.raises(Unauthorized) as refused:
        caller(authenticator)
    assert refused.value.slug == slug


def test_without_a_database_a_token_is_not_called_wrong(
    authenticator: Authenticator, tokens: TokenStore
) -> None:
    tokens.is_away = True
    with pytest.raises(Problem) as refused, capture_logs() as logs:
        caller(authenticator)
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
    assert "no route" not in refused.value.detail, "the client may be a stranger"
    assert [(log["action"], log["reason"]) for log in logs] == [
        ("token_not_looked_up", "no route to host")
    ]


def test_a_use_that_cannot_be_recorded_refuses_no_request(
    authenticator: Authenticator, tokens: TokenStore
) -> None:
    tokens.is_read_only = True
    with capture_logs() as logs:
        assert [caller(authenticator), caller(authenticator)] == ["token:ci submit"] * 2
    assert [log["action"] for log in logs] == ["token_use_lost"]


def test_a_cached_token_needs_no_database(
    authenticator: Authenticator, tokens: TokenStore, hand: ManualClock[datetime]
) -> None:
    caller(authenticator)
    tokens.is_cached = tokens.is_away = True
    assert caller(authenticator) == "token:ci submit"
    for text in (WRONG, "mst_"):
        with pytest.raises(Problem):
            caller(authenticator, text)
    hand.now += timedelta(minutes=2)  # its use must be recorded again
    with pytest.raises(Problem):
        caller(authenticator)


def test_a_token_of_the_environment_needs_no_database(tokens: TokenStore) -> None:
    tokens.is_away = True
    text = "0123456789abcdef" * 2
    authenticator = Authenticator(
        tokens,
        ManualClock(NOON),
        own_uid=OWN_UID,
        require_token=False,
        token_sha256=sha256_of(text),
    )
    assert caller(authenticator, text) == "MUSTER_TOKEN admin"
    with pytest.raises(Unauthorized) as refused:
        caller(authenticator, text + "0")
    assert refused.value.slug == "unknown-token"


def test_a_required_token_is_required_of_the_own_user() -> None:
    strict = Authenticator(
        TokenStore(), ManualClock(NOON), own_uid=OWN_UID, require_token=True, token_sha256=None
    )
    assert not strict.is_own_user(OWN_UID)
    refused = []
    for uid in (OWN_UID, OWN_UID + 1):
        with pytest.raises(Unauthorized) as caught:
            caller(strict, None, uid)
        refused.append(caught.value)
    assert [one.slug for one in refused] == ["token-required", "no-token"]
    assert "MUSTER_REQUIRE_TOKEN=0" in refused[0].detail
    assert "MUSTER_REQUIRE_TOKEN" not in refused[1].detail, "settings are not for strangers"


def test_uses_are_recorded_once_a_minute(
    authenticator: Authenticator, tokens: TokenStore, hand: ManualClock[datetime]
) -> None:
    for _ in range(5):
        caller(authenticator)
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
    assert tokens.find("nobody") is tokens.find_cached("nobody") is None
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
