"""``muster config``: every setting, and where it is from."""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import typer

from cli.exit_codes import ExitCode
from cli.output import Output, OutputOption, show
from cli.tables import UNKNOWN, table
from muster.contracts.environ import CA_FILE
from muster.contracts.printable import spelt_out
from muster.remarks import remark

OWN_UP: Final = "muster up"
"""The origin of what commands have from their own `up`, and from no setting."""

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
    Where commands ask the `muster up` of their data directory it is that one's
    URL and certificate. Of secrets it is only shown that there are any. Exit
    code 2 if a value cannot be meant: its row says so.
    """
    from cli.origins import origin_of, placed  # noqa: PLC0415  --help
    from cli.own_up import own_up, way_to  # noqa: PLC0415  --help
    from cli.preferences import preferences  # noqa: PLC0415  --help
    from cli.settings import sound_values  # noqa: PLC0415  --help

    said = preferences(os.environ)
    sound, wrong = sound_values(os.environ)
    by_up = dict(zip(("MUSTER_URL", CA_FILE), way_to(own_up()), strict=True))
    found = [
        {
            "name": name,
            "value": wrong[name].value if name in wrong else by_up.get(name) or sound[name],
            "origin": OWN_UP if by_up.get(name) else origin_of(name, os.environ, said),
            "problem": f"is not {wrong[name].wanted}" if name in wrong else None,
        }
        for name in dict.fromkeys([*sound, *wrong])
    ]
    columns = ("name", "origin", "value") if origin else ("name", "value")
    rows = ([_cell(one, column) for column in columns] for one in found)
    show(output, found, table(columns, rows), (str(one["name"]) for one in found))
    for sentence in _misspelt(os.environ):
        typer.echo(sentence, err=True)
    for error in wrong.values():
        remark(spelt_out(f"muster: {placed(error, os.environ)}"))
    if wrong:
        raise typer.Exit(ExitCode.USAGE)


def _cell(one: Mapping[str, str | None], column: str) -> str:
    """Return what stands in a column; a value that cannot be is marked."""
    text = one[column]
    if column == "value" and one["problem"]:
        return spelt_out(f"{text!r} {one['problem']}")
    return text or UNKNOWN


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    from cli.settings import misspelt  # noqa: PLC0415  --help

    for name in environ:
        meant = misspelt(name) if name.startswith("MUSTER_") else None
        if meant is not None:
            yield f"{name} is no setting: did you mean {meant}?"
