"""Tokens: make, list, revoke. The text of a token is in one answer, and nowhere else."""

import re
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.access import ADMIN
from api.desk import Desk, Principal
from api.json_bodies import JsonRoute
from api.responses import refusals
from api.token_schemas import TokenCreated, TokenList, TokenRequest, TokenView, token_view
from muster.contracts.token import NAME_PATTERN
from store.errors import TokenMissing

router = APIRouter(tags=["tokens"], route_class=JsonRoute)


@router.post(
    "/tokens", status_code=HTTPStatus.CREATED, summary="Make a token", dependencies=[ADMIN]
)
def create_token(
    asked: TokenRequest, desk: Desk, principal: Principal, response: Response
) -> TokenCreated:
    """Answer with its text, which is not kept and cannot be asked for again."""
    seconds = asked.expires_in_seconds
    token, text = desk.tokens.create(
        asked.name,
        asked.scope,
        lifetime=None if seconds is None else timedelta(seconds=seconds),
        created_by=principal,
    )
    response.headers["Cache-Control"] = "no-store"
    return TokenCreated(**token_view(token, desk.clock()).model_dump(), token=text)


@router.get(
    "/tokens",
    summary="Every token, oldest first; for 30 days those that open nothing any more",
    dependencies=[ADMIN],
)
def list_tokens(desk: Desk) -> TokenList:
    now = desk.clock()
    return TokenList(tokens=[token_view(token, now) for token in desk.tokens.all()])


@router.delete(
    "/tokens/{name}",
    summary="Revoke a token, at once",
    responses=refusals(HTTPStatus.NOT_FOUND),
    dependencies=[ADMIN],
)
def revoke_token(
    name: Annotated[str, Path(description="The token's name.")], desk: Desk
) -> TokenView:
    """End it for good; its row stays for a while, to say whose it was."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise TokenMissing(name)  # what cannot be a name goes no further
    return token_view(desk.tokens.revoke(name), desk.clock())
