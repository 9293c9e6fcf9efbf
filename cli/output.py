"""How an answer is printed: a table for people; JSON, YAML or names for programs.

Text that others wrote never reaches a terminal with control characters in it.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from operator import itemgetter
from threading import Timer
from typing import Any, Final, TypeAlias

import click

from muster.contracts.errors import printable
from muster.contracts.job.status import JobStatus
from muster.contracts.location import expand_home
from muster.runtime.stderr_messages import print_stderr

Cell: TypeAlias = str | int | None

STATUS_COLOURS: Final[Mapping[str, str]] = {
    JobStatus.RUNNING: "green",
    JobStatus.RECOVERING: "yellow",
    JobStatus.FAILED: "red",
    JobStatus.COMPLETED: "bright_black",
    JobStatus.STOPPED: "bright_black",
}
RANK_COLOURS: Final = ("cyan", "yellow", "green", "magenta", "blue")

ROUTINE_EVENTS: Final = frozenset({"submitted", "rank_exited", "job_failing"})
"""Every job has these. Why a rank is restarted is part of the event about the job's status."""

UNKNOWN: Final = "-"
"""What a table shows for None."""

NAME_WIDTH: Final = 16
"""Of a machine's name, so that a table of ranks fits 80 columns."""

NOTICE_SECONDS: Final = 1.5
"""After this long without output, a command prints what it waits for."""

_GAP: Final = "  "
_SECONDS_PER_UNIT: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Output(StrEnum):
    """The formats of ``--output``."""

    TABLE = "table"
    JSON = "json"
    """The body of the API's response."""
    YAML = "yaml"
    NAME = "name"
    """One id per line, for `xargs`."""


class Group(click.Group):
    """A group of commands in which `list` is another name of `ls`; help does not show it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, "ls" if cmd_name == "list" else cmd_name)


class ShellPath(click.Path):
    """A path with ``~`` as a shell reads it, also in ``--out=~/x``, which it does not read."""

    def convert(self, value: Any, *context: Any) -> Any:  # noqa: ANN401  as it declares them
        return super().convert(expand_home(os.fspath(value)), *context)


output_option: Final = click.option(
    "-o",
    "--output",
    type=click.Choice(Output, case_sensitive=False),
    default=Output.TABLE,
    help="Output format. Default: table.",
)


def show(
    output: Output,
    body: object,
    lines: Iterable[str],
    names: Iterable[str],
    colours: Iterable[str] = (),
) -> None:
    """Print an answer to standard output.

    `body` is the API's; `lines` make the table and `names` the ids, and are read only if shown.
    `colours` are those of the lines.
    """
    match output:
        case Output.TABLE:
            pairs = zip_longest(lines, colours, fillvalue="")
            shown = [painted(printable(line), colour) for line, colour in pairs]
        case Output.NAME:
            shown = [printable(name) for name in names]
        case Output.JSON:
            shown = [_json(body)]
        case Output.YAML:
            shown = [_yaml(body)]
    for line in shown:
        click.echo(line)


def painted(text: str, colour: str) -> str:
    """Return `text` in a colour, if standard output is a terminal and NO_COLOR is not set."""
    is_plain = not colour or not sys.stdout.isatty() or os.environ.get("NO_COLOR")
    return text if is_plain else click.style(text, fg=colour)


def _json(body: object) -> str:
    import json  # noqa: PLC0415  not needed for --help

    import msgspec  # noqa: PLC0415  as above

    document = msgspec.json.format(msgspec.json.encode(body), indent=2).decode()
    # JSON itself escapes only the control characters below 0x20.
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char).strip('"')
        for char in document
    )


def _yaml(body: object) -> str:
    from ruamel.yaml import YAML  # noqa: PLC0415  only for -o yaml

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    # Of what is not ASCII, ruamel.yaml escapes everything or only the control characters.
    yaml.allow_unicode = "\\u" not in _json(body)
    text = io.StringIO()
    yaml.dump(body, text)
    return text.getvalue().rstrip("\n")


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    """Return a line for the header and one per row; columns with numbers are right-aligned."""
    padded = []
    for column in zip(header, *rows, strict=True):
        texts = [UNKNOWN if cell is None else str(cell) for cell in column]
        pad = str.rjust if any(isinstance(cell, int) for cell in column) else str.ljust
        padded.append([pad(text, max(map(len, texts))) for text in texts])
    return (_GAP.join(cells).rstrip() for cells in zip(*padded, strict=True))


Column: TypeAlias = str | Callable[[Mapping[str, Any]], Cell]
"""A cell of a row: the value of a key, or what a function makes of the row."""


def columns(rows: Iterable[Mapping[str, Any]], shown: Mapping[str, Column]) -> Iterator[str]:
    """Return the table of `rows` that has these columns, by their headings."""
    cells = [itemgetter(cell) if isinstance(cell, str) else cell for cell in shown.values()]
    return table(list(shown), ([cell(row) for cell in cells] for row in rows))


def facts(pairs: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """Yield a line per name and value, values in one column; a value of None is left out."""
    known = [(name, value) for name, value in pairs if value is not None]
    width = max(len(name) for name, _ in known)
    return (f"{name:<{width}}{_GAP}{value}" for name, value in known)


def shortened(text: str | None, width: int) -> str | None:
    """Return `text`, cut at the end to `width` characters."""
    return text if text is None or len(text) <= width else f"{text[: width - 1]}…"


def cropped(text: str, width: int) -> str:
    """Return `text`, cut in the middle to `width` characters: the end of an id is random."""
    if len(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    return f"{text[: max(0, width - 1) - tail]}…{text[len(text) - tail :]}"


class Tracebacks:
    """Shows a traceback that several ranks or attempts print only the first time."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._begun: dict[int, list[str]] = {}
        """By rank, a traceback of which more is to come."""

    def pass_on(self, rank: int, line: str) -> list[str]:
        """Return what to show now: nothing within a traceback, all of it with its last line."""
        begun = self._begun.pop(rank, [])
        if not begun and line != "Traceback (most recent call last):":
            return [line]
        begun.append(line)
        if len(begun) == 1 or line.startswith(" "):
            self._begun[rank] = begun
            return []
        text = "\n".join(begun)
        if text in self._shown:
            return [f"{line} (as above)"]
        self._shown.add(text)
        return begun

    def rest(self) -> list[tuple[int, str]]:
        """Return the lines of tracebacks that have no end, after their ranks."""
        begun, self._begun = self._begun, {}
        return [(rank, line) for rank, lines in begun.items() for line in lines]

    def shorten(self, message: str) -> str:
        """Return a message without the tracebacks that it quotes and that were shown."""
        first, *quoted = message.split("\n  ")
        kept = [text for line in quoted for text in self.pass_on(-1, line)]
        return "\n  ".join([first, *kept, *self._begun.pop(-1, [])])


def plural(count: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def moment(time: datetime | str) -> str:
    """Return a time in UTC to the second; text is taken as the API writes it."""
    text = time if isinstance(time, str) else time.isoformat()
    return text[:19].replace("T", " ")


def seconds_of(text: str) -> int | None:
    """Return the seconds of a duration such as ``90d``; None for anything else."""
    found = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    return int(found[1]) * _SECONDS_PER_UNIT[found[2]] if found else None


def say(sentence: str) -> None:
    """Print a message on standard error."""
    print_stderr(f"muster: {sentence}")


@contextmanager
def notice_if_slow(sentence: str) -> Iterator[None]:
    """Print `sentence` to standard error if the body takes longer than `NOTICE_SECONDS`."""
    notice = Timer(NOTICE_SECONDS, say, [sentence])
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
