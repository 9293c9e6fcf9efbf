"""Tokens: create, list, revoke. Only the response to the creation has the text of a token."""

import re
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Response

from api.dependencies import ADMIN, CallerName, State
from api.schema import TokenRequest, body, refusals, reply, returns
from api.views import token_view
from database.errors import TokenMissing
from muster.contracts.token import NAME_PATTERN
from muster.contracts.views import TokenCreated, TokenList, TokenView

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokens",
    status_code=HTTPStatus.CREATED,
    summary="Create a token",
    responses=returns(TokenCreated, HTTPStatus.CREATED),
    dependencies=[ADMIN],
)
def create_token(
    asked: Annotated[TokenRequest, body(TokenRequest)], desk: State, principal: CallerName
) -> Response:
    """Return the token's text, which is not stored and cannot be requested again."""
    seconds = asked.expires_in_seconds
    token, text = desk.tokens.create(
        asked.name,
        asked.scope,
        lifetime=None if seconds is None else timedelta(seconds=seconds),
        created_by=principal,
    )
    fields = msgspec.structs.asdict(token_view(token, desk.clock()))
    headers = {"Cache-Control": "no-store"}
    return reply(TokenCreated(**fields, token=text), HTTPStatus.CREATED, headers)


@router.get(
    "/tokens",
    summary="Tokens, oldest first; invalid ones for 30 days",
    responses=returns(TokenList),
    dependencies=[ADMIN],
)
def list_tokens(desk: State) -> Response:
    now = desk.clock()
    return reply(TokenList(tokens=[token_view(token, now) for token in desk.tokens.all()]))


@router.delete(
    "/tokens/{name}",
    summary="Revoke a token at once",
    responses=returns(TokenView) | refusals(HTTPStatus.NOT_FOUND),
    dependencies=[ADMIN],
)
def revoke_token(
    name: Annotated[str, Path(description="The token's name.")], desk: State
) -> Response:
    """Revoke it for good; its row stays for a while as a record."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise TokenMissing(name)
    return reply(token_view(desk.tokens.revoke(name), desk.clock()))
