"""Who is let in while the database is away or slow; the rest is tested on a real service."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hand import Hand
from store_samples import NOON
from structlog.testing import capture_logs
from unit.api.one_token import TEXT, OneToken

from api.identity import Identities, Unauthorized
from api.problems import Problem
from muster.contracts.token import sha256_of

OWN_UID = 7


@pytest.fixture
def hand() -> Hand[datetime]:
    return Hand(NOON)


@pytest.fixture
def tokens() -> OneToken:
    return OneToken()


@pytest.fixture
def identities(tokens: OneToken, hand: Hand[datetime]) -> Identities:
    return Identities(
        tokens, hand, own_uid=OWN_UID, require_token=False, token_sha256=sha256_of(TEXT)
    )


def who(identities: Identities, text: str | None = TEXT, uid: int | None = None) -> str:
    header = None if text is None else f"Bearer {text}"
    caller = asyncio.run(identities.identify(uid, header))
    return f"{caller.name} {caller.scope}"


def test_the_own_user_needs_no_token_and_no_database(
    identities: Identities, tokens: OneToken
) -> None:
    tokens.is_away = True
    assert who(identities, None, OWN_UID) == "uid:7 admin"
    for uid in (None, 0, 8):
        with pytest.raises(Unauthorized, match="needs a token"):
            who(identities, None, uid)


def test_a_wrong_token_is_refused_whoever_shows_it(identities: Identities) -> None:
    with pytest.raises(Unauthorized, match="none of this service"):
        who(identities, TEXT[:-1] + "0", OWN_UID)


def test_a_token_that_is_kept_has_the_scope_it_was_made_with(
    identities: Identities, tokens: OneToken
) -> None:
    assert who(identities) == "token:ci submit", "though MUSTER_TOKEN names the same one"
    tokens.token = replace(tokens.token, revoked_at=NOON)
    with pytest.raises(Unauthorized, match="was revoked"):
        who(identities)


def test_while_tokens_cannot_be_read_nobody_is_taken_for_a_stranger(
    identities: Identities, tokens: OneToken
) -> None:
    tokens.is_away = True
    with pytest.raises(Problem) as caught, capture_logs() as logs:
        who(identities)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "1")
    assert "nobody there" not in caught.value.detail, "it may be told to anybody"
    assert [(log["action"], log["reason"]) for log in logs] == [
        ("token_not_looked_up", "nobody there")
    ]


def test_a_use_that_cannot_be_noted_turns_nobody_away(
    identities: Identities, tokens: OneToken
) -> None:
    tokens.is_read_only = True
    with capture_logs() as logs:
        assert [who(identities), who(identities)] == ["token:ci submit"] * 2
    assert [log["action"] for log in logs] == ["token_use_lost"]


def test_who_was_seen_a_moment_ago_is_known_without_the_database(
    identities: Identities, tokens: OneToken, hand: Hand[datetime]
) -> None:
    who(identities)
    tokens.is_at_hand = tokens.is_away = True
    assert who(identities) == "token:ci submit"
    for text in (TEXT[:-1] + "0", "mst_"):
        with pytest.raises(Problem):
            who(identities, text)
    hand.now += timedelta(minutes=2)  # a use is to be noted again, which a thread does
    with pytest.raises(Problem):
        who(identities)


def test_what_is_no_token_of_a_store_is_not_looked_for_there(tokens: OneToken) -> None:
    tokens.is_away = True
    made_up = "0123456789abcdef" * 2
    lone = Identities(
        tokens, Hand(NOON), own_uid=OWN_UID, require_token=False, token_sha256=sha256_of(made_up)
    )
    assert who(lone, made_up) == "MUSTER_TOKEN admin"
    with pytest.raises(Unauthorized, match="none of this service"):
        who(lone, made_up + "0")


def test_where_a_token_is_required_the_own_user_is_nobody() -> None:
    strict = Identities(
        OneToken(), Hand(NOON), own_uid=OWN_UID, require_token=True, token_sha256=None
    )
    assert not strict.is_own(OWN_UID)
    with pytest.raises(Unauthorized, match="needs a token") as own:
        who(strict, None, OWN_UID)
    with pytest.raises(Unauthorized) as other:
        who(strict, None, OWN_UID + 1)
    assert [own.value.slug, other.value.slug] == ["token-required", "no-token"]
    assert "while it runs with MUSTER_REQUIRE_TOKEN=0" in own.value.detail
    assert "MUSTER_REQUIRE_TOKEN" not in other.value.detail, "how it is set is no stranger's affair"


def test_uses_are_noted_once_a_minute(
    identities: Identities, tokens: OneToken, hand: Hand[datetime]
) -> None:
    for _ in range(5):
        who(identities)
        hand.now += timedelta(seconds=30)
    assert tokens.noted == [NOON, NOON + timedelta(minutes=1), NOON + timedelta(minutes=2)]
