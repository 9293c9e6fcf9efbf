"""How an answer is shown: as a table for people, or as it is for programs."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer


class Output(StrEnum):
    """What ``-o`` takes."""

    TABLE = "table"
    JSON = "json"
    """The API's body."""
    YAML = "yaml"
    NAME = "name"
    """One id per line, for `xargs`."""


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="How to show it.", show_choices=True)
]


def show(output: Output, body: object, lines: Iterable[str], names: Iterable[str]) -> None:
    """Print an answer to standard output.

    `body` is the API's; `lines` are those of the table, made only if they are shown.
    """
    match output:
        case Output.TABLE:
            shown = lines
        case Output.NAME:
            shown = names
        case Output.JSON:
            import msgspec  # noqa: PLC0415  as below

            shown = [msgspec.json.format(msgspec.json.encode(body), indent=2).decode()]
        case Output.YAML:
            import yaml  # noqa: PLC0415  only where it is asked for

            shown = [yaml.safe_dump(body, sort_keys=False, allow_unicode=True).rstrip("\n")]
    for line in shown:
        typer.echo(line)
