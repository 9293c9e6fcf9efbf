"""``muster token``: who may use the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import click

from cli.connection import connected
from cli.output import Column, Group, Output, columns, moment, output_option, seconds_of, show
from muster.contracts.token import SECONDS_LIMIT, Scope

_TOKENS: Final[Mapping[str, Column]] = {
    "name": "name",
    "scope": "scope",
    "id": "token_id",
    "state": lambda token: (
        "valid" if token["is_valid"] else "revoked" if token["revoked_at"] else "expired"
    ),
    "created (UTC)": lambda token: _minute(token["created_at"]),
    "by": "created_by",
    "expires": lambda token: _minute(token["expires_at"]),
    "last used": lambda token: _minute(token["last_used_at"]),
}

_token_name: Final = click.argument("name", metavar="NAME", help="Who or what it is for.")


@click.group(cls=Group)
def token() -> None:
    """Create, list and revoke API tokens."""


@token.command()
@_token_name
@click.option(
    "--scope",
    type=click.Choice(Scope, case_sensitive=False),
    default=Scope.READ,
    help="read: only read (default). submit: also change jobs. admin: also tokens and sweeps.",
)
@click.option(
    "--expires-in", metavar="TIME", help="Such as 90d, 12h or 30m. Default: it does not expire."
)
def create(name: str, scope: Scope, expires_in: str | None) -> None:
    """Create a token and print it, once only. Clients send it from MUSTER_TOKEN."""
    body: dict[str, Any] = {"name": name, "scope": scope.value}
    if expires_in is not None:
        seconds = seconds_of(expires_in)
        if seconds is None or not 0 < seconds <= SECONDS_LIMIT:
            raise click.BadParameter(
                f"expected a number with s, m, h or d such as 90d, got {expires_in!r}",
                param_hint="--expires-in",
            )
        body["expires_in_seconds"] = seconds
    with connected() as client:
        created = client.connection.ask("POST", "/tokens", body=body).read_as(dict[str, Any])
    click.echo(created["token"])
    until = f"until {_minute(created['expires_at'])} UTC" if created["expires_at"] else "for ever"
    click.echo(
        f"{name} has scope {scope.value} {until}. The token is shown only now: set MUSTER_TOKEN to "
        f"it where it is used; to revoke it: muster token revoke {name}",
        err=True,
    )


@token.command("ls")
@click.option("--all", "every", is_flag=True, help="Also those revoked or expired last month.")
@output_option
def list_tokens(*, every: bool, output: Output) -> None:
    """List tokens, and when each was last used."""
    with connected() as client:
        found = client.connection.get("/tokens")["tokens"]
    listed = [token for token in found if every or token["is_valid"]]
    names = (token["name"] for token in listed)
    show(output, {"tokens": listed}, columns(listed, _TOKENS), names)
    if len(listed) < len(found):
        click.echo(f"{len(found) - len(listed)} revoked or expired: --all", err=True)


@token.command()
@_token_name
def revoke(name: str) -> None:
    """Revoke a token at once."""
    with connected() as client:
        client.connection.ask("DELETE", f"/tokens/{quote(name, safe='')}")
    click.echo(f"{name} is revoked")


def _minute(text: str | None) -> str | None:
    return text and moment(text)[:16]
