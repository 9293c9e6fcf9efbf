"""Scopes cover one another, and only what looks like a token is one."""

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from muster.contracts.token import Scope, Token, id_in, matches, new_text, sha256_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TEXT = new_text(lambda size: bytes(range(160, 160 + size)))


@pytest.mark.parametrize(("scope", "needed"), list(product(Scope, repeat=2)))
def test_a_scope_covers_itself_and_what_is_less(scope: Scope, needed: Scope) -> None:
    words = ["read", "submit", "admin"]
    assert scope.covers(needed) is (words.index(scope) >= words.index(needed))


def test_a_new_token_is_found_by_the_id_in_its_text() -> None:
    identity = id_in(TEXT)
    assert identity is not None
    assert TEXT.startswith(f"mst_{identity}_")
    assert len(bytes.fromhex(TEXT.rpartition("_")[2])) == 32


@pytest.mark.parametrize(
    "text", ["", "mst_", TEXT[:-1], TEXT + "0", f" {TEXT}", f"{TEXT}\n", TEXT.upper(), "x" + TEXT]
)
def test_what_does_not_look_like_a_token_is_none(text: str) -> None:
    assert id_in(text) is None


def test_only_the_text_itself_matches_what_is_kept_of_it() -> None:
    assert matches(TEXT, sha256_of(TEXT))
    for other in ("", TEXT[:-1], "ü", "\udcff"):
        assert not matches(other, sha256_of(TEXT))


def test_a_token_opens_nothing_once_it_is_expired_or_revoked() -> None:
    day = timedelta(days=1)
    for expires_at, revoked_at, is_valid in [
        (None, None, True),
        (NOON + day, None, True),
        (NOON, None, False),
        (NOON - day, None, False),
        (NOON + day, NOON, False),
        (None, NOON - day, False),
    ]:
        token = Token(
            token_id="0" * 12,
            name="ci",
            scope=Scope.READ,
            sha256="hash",
            created_at=NOON - day,
            created_by=None,
            expires_at=expires_at,
            revoked_at=revoked_at,
        )
        assert token.is_valid(NOON) is is_valid
        assert "hash" not in repr(token)
