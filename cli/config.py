"""``muster config``: every setting, and where it is from."""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from cli.output import Output, OutputOption, show
from cli.tables import UNKNOWN, table

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
    """Show every setting and its value; on demand, where it is from.

    Settings are environment variables. What they do not say is taken from the
    file ~/.config/muster/config.toml, if there is one, which has the same names.
    Of secrets it is only shown that there are any.
    """
    from cli.preferences import preferences  # noqa: PLC0415  --help
    from cli.settings import values  # noqa: PLC0415  --help

    said = preferences(os.environ)
    found = [
        {"name": name, "value": value, "origin": origin_of(name, os.environ, said)}
        for name, value in values(os.environ).items()
    ]
    columns = ("name", "origin", "value") if origin else ("name", "value")
    rows = ([one[column] or UNKNOWN for column in columns] for one in found)
    show(output, found, table(columns, rows), (str(one["name"]) for one in found))
    for sentence in _misspelt(os.environ):
        typer.echo(sentence, err=True)


def origin_of(name: str, environ: Mapping[str, str], said: Mapping[str, str]) -> str:
    """Return where a setting is from; one that is set and empty is not set.

    `environ` has what the file says, `said`, already.
    """
    text = environ.get(name)
    if not text:
        return "default"
    return "file" if said.get(name) == text else "environment"


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    from cli.settings import misspelt  # noqa: PLC0415  --help

    for name in environ:
        meant = misspelt(name) if name.startswith("MUSTER_") else None
        if meant is not None:
            yield f"{name} is no setting: did you mean {meant}?"
