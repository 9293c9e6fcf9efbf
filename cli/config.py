"""``muster config``: every setting of the services and of the commands, and where it is from."""

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final

import msgspec
import typer

from cli.heavy import own_settings
from cli.output import Output, OutputOption, show
from cli.tables import UNKNOWN, table
from muster.contracts.environ import CA_FILE, ORPHAN_TIMEOUT, TOKEN, DoorSettings, api_url
from muster.contracts.secrets import LENT

MASK: Final = "***"

_NOT_AS_THE_FIELD: Final[Mapping[str, str]] = {
    "checkpoint_dir": "CHECKPOINT_DIR",
    "dataset_dir": "DATASET_DIR",
    "orphan_timeout_seconds": ORPHAN_TIMEOUT,
    "token_sha256": TOKEN,
}
"""Variables that are not MUSTER_ and the name of their field."""

LIKE: Final = 0.85
"""How near a name has to be to that of a setting to be taken for it, misspelt."""

app = typer.Typer(help="Show the settings.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the settings."""


@app.command("show")
def show_settings(
    *,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each is from, as well.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show every setting, its value, and on demand whether it is set or the default.

    Settings are environment variables. Secrets are not shown, but whether there are any.
    """
    found = [
        {"name": name, "value": value, "origin": origin_of(name, os.environ)}
        for name, value in values(os.environ).items()
    ]
    columns = ("name", "value", "origin") if origin else ("name", "value")
    rows = ([one[column] or UNKNOWN for column in columns] for one in found)
    show(output, found, table(columns, rows), (str(one["name"]) for one in found))
    for sentence in _misspelt(os.environ):
        typer.echo(sentence, err=True)


def values(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return each setting by its variable, as it holds; raises `InvalidEnvironment`."""
    door = DoorSettings.read(environ)
    settings = {**msgspec.structs.asdict(own_settings()), **msgspec.structs.asdict(door)}
    found = {variable_of(field): _text(value) for field, value in settings.items()}
    found["MUSTER_DATABASE_URL"] = _masked(str(settings["database_url"]))
    found[TOKEN] = None if door.token_sha256 is None else MASK
    as_they_are = {name: environ.get(name) for name in (LENT, CA_FILE)}
    return {**found, "MUSTER_URL": _masked(api_url(environ)), **as_they_are}


def variable_of(field: str) -> str:
    """Return the variable that a field of the settings is read from."""
    return _NOT_AS_THE_FIELD.get(field, f"MUSTER_{field.upper()}")


def origin_of(name: str, environ: Mapping[str, str]) -> str:
    """Return where a setting is from; one that is set and empty is not set."""
    return "environment" if environ.get(name) else "default"


def _text(value: Any) -> str | None:  # noqa: ANN401  of any kind
    match value:
        case None:
            return None
        case bool():
            return str(int(value))
        case frozenset():
            return ",".join(sorted(value)) or None
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _masked(url: str) -> str:
    """Return a URL without the password in it, wherever that is."""
    url = re.sub(r"(://[^:@]*):.*@", rf"\1:{MASK}@", url)  # to the last @: others are its own
    return re.sub(r"(?i)(password|passwd|secret|token)=[^&]*", rf"\1={MASK}", url)


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    known = [*values(environ)]
    for name in environ:
        near = get_close_matches(name, known, n=1, cutoff=LIKE)
        if near and name not in known and name.startswith("MUSTER_"):
            yield f"{name} is no setting: did you mean {near[0]}?"
