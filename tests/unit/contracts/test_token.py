"""Scopes, and the text, hash and validity of tokens."""

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from muster.contracts.token import Scope, Token, id_in, matches, new_text, sha256_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TEXT = new_text(lambda size: bytes(range(160, 160 + size)))


@pytest.mark.parametrize(("scope", "needed"), list(product(Scope, repeat=2)))
def test_scope_covers_itself_and_lower_ones(scope: Scope, needed: Scope) -> None:
    words = ["read", "submit", "admin"]
    assert scope.covers(needed) is (words.index(scope) >= words.index(needed))


def test_new_token_holds_its_id() -> None:
    identity = id_in(TEXT)
    assert identity is not None
    assert TEXT.startswith(f"mst_{identity}_")
    assert len(bytes.fromhex(TEXT.rpartition("_")[2])) == 32


@pytest.mark.parametrize(
    "text", ["", "mst_", TEXT[:-1], TEXT + "0", f" {TEXT}", f"{TEXT}\n", TEXT.upper(), "x" + TEXT]
)
def test_invalid_token_text_has_no_id(text: str) -> None:
    assert id_in(text) is None


def test_only_the_same_text_matches_the_hash() -> None:
    assert matches(TEXT, sha256_of(TEXT))
    for other in ("", TEXT[:-1], "ü", "\udcff"):
        assert not matches(other, sha256_of(TEXT))


def test_expired_or_revoked_token_is_invalid() -> None:
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
