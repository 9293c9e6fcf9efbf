"""``muster token``: let others in, see who may come, and shut them out again."""

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from cli.connected import connected
from cli.output import Output, OutputOption, show
from cli.tables import table
from cli.times import seconds_of, shown
from muster.contracts.token import SECONDS_LIMIT, Scope

_HEADER: Final = ("name", "scope", "id", "state", "created (UTC)", "by", "expires", "last used")

app = typer.Typer(
    help="Tokens, by which others than the service's own user may use it.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Who or what it is for.", metavar="NAME")]

Every = Annotated[
    bool, typer.Option("--all", help="Those, too, that were revoked or expired in the last month.")
]


@app.command()
def create(
    name: Name,
    scope: Annotated[
        Scope,
        typer.Option(help="read looks, submit changes jobs as well, admin makes tokens, too."),
    ] = Scope.READ,
    expires_in: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 90d, 12h or 30m. Default: it does not expire."),
    ] = None,
) -> None:
    """Make a token and print it, this once. Whoever has it sends it from MUSTER_TOKEN."""
    asked: dict[str, Any] = {"name": name, "scope": scope.value}
    if expires_in is not None:
        asked["expires_in_seconds"] = _seconds(expires_in)
    with connected() as client:
        made = client.connection.ask("POST", "/tokens", body=asked).read_as(dict[str, Any])
    typer.echo(made["token"])
    until = f"until {_moment(made['expires_at'])} (UTC)" if made["expires_at"] else "for ever"
    typer.echo(
        f"{name} may {scope.value} {until}; it is shown this once: export MUSTER_TOKEN with it "
        f"where it is used, and end it with: muster token revoke {name}",
        err=True,
    )


@app.command()
def ls(*, every: Every = False, output: OutputOption = Output.TABLE) -> None:
    """Show who may come in, and when they last did."""
    with connected() as client:
        found = client.connection.get("/tokens")["tokens"]
    listed = [token for token in found if every or token["is_valid"]]
    names = (token["name"] for token in listed)
    show(output, {"tokens": listed}, table(_HEADER, map(_row, listed)), names)
    if len(listed) < len(found):
        typer.echo(f"{len(found) - len(listed)} revoked or expired: --all", err=True)


@app.command()
def revoke(name: Name) -> None:
    """End a token for good, at once."""
    with connected() as client:
        client.connection.ask("DELETE", f"/tokens/{quote(name, safe='')}")
    typer.echo(f"{name} opens nothing any more")


def _seconds(text: str) -> int:
    seconds = seconds_of(text)
    if seconds is None or not 0 < seconds <= SECONDS_LIMIT:
        raise typer.BadParameter(
            f"{text!r} is no time: give a number with s, m, h or d, such as 90d",
            param_hint="--expires-in",
        )
    return seconds


def _row(token: Mapping[str, Any]) -> tuple[str | None, ...]:
    return (
        token["name"],
        token["scope"],
        token["token_id"],
        _state(token),
        _moment(token["created_at"]),
        token["created_by"],
        _moment(token["expires_at"]),
        _moment(token["last_used_at"]),
    )


def _state(token: Mapping[str, Any]) -> str:
    if token["is_valid"]:
        return "valid"
    return "revoked" if token["revoked_at"] else "expired"


def _moment(text: str | None) -> str | None:
    return text and shown(text)[:16]
