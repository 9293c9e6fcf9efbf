"""Tokens, as OpenAPI shows them: what comes in, and what goes out."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from muster.contracts.token import NAME_PATTERN, SECONDS_LIMIT, Scope, Token


class TokenRequest(BaseModel):
    """A token to be made."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"name": "ci", "scope": "submit", "expires_in_seconds": 2592000}]
        },
    )

    name: str = Field(pattern=f"^{NAME_PATTERN}$", description="Who or what it is for.")
    scope: Scope = Field(
        default=Scope.READ, description="read, submit (changes jobs, too) or admin (makes tokens)."
    )
    expires_in_seconds: int | None = Field(
        default=None, strict=True, ge=1, le=SECONDS_LIMIT, description="null: it does not expire."
    )


class TokenView(BaseModel):
    token_id: str = Field(description="What its text begins with, after mst_.")
    name: str
    scope: Scope
    is_valid: bool
    created_at: datetime
    created_by: str | None
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(description="To the minute.")


class TokenCreated(TokenView):
    token: str = Field(description="Its text. It is shown this once.")


class TokenList(BaseModel):
    tokens: list[TokenView]


def token_view(token: Token, now: datetime) -> TokenView:
    """Return the public face of a token's row, which tells nothing of its text."""
    return TokenView(
        token_id=token.token_id,
        name=token.name,
        scope=token.scope,
        is_valid=token.is_valid(now),
        created_at=token.created_at,
        created_by=token.created_by,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
        last_used_at=token.last_used_at,
    )
