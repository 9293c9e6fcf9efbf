"""How an answer is shown: as a table for people, or as it is for programs.

Whatever others have put into it, no terminal gets a control character of theirs.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from muster.contracts.printable import spelt_out


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
            shown = [spelt_out(line) for line in lines]
        case Output.NAME:
            shown = [spelt_out(name) for name in names]
        case Output.JSON:
            shown = [_json(body)]
        case Output.YAML:
            import yaml  # noqa: PLC0415  only where it is asked for

            shown = [yaml.safe_dump(body, sort_keys=False, allow_unicode=True).rstrip("\n")]
    for line in shown:
        typer.echo(line)


def _json(body: object) -> str:
    import msgspec  # noqa: PLC0415  --help

    document = msgspec.json.format(msgspec.json.encode(body), indent=2).decode()
    # Those below 0x20 it escapes by itself, as JSON wants it.
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", document)
