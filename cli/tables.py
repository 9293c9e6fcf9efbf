"""Rows for a terminal: columns as wide as they have to be, numbers to the right."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

Cell: TypeAlias = str | int | None

UNKNOWN: Final = "-"
GAP: Final = "  "

NAME_WIDTH: Final = 16
"""Of a machine's name, so that a table of ranks fits 80 columns."""


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    """Yield a line for the header and one for each row; None is shown as a dash."""
    lines = [header, *rows]
    columns = list(zip(*lines, strict=True))
    widths = [max(len(_text(cell)) for cell in column) for column in columns]
    right = [any(isinstance(cell, int) for cell in column) for column in columns]
    for cells in lines:
        padded = [
            _text(cell).rjust(width) if is_number else _text(cell).ljust(width)
            for cell, width, is_number in zip(cells, widths, right, strict=True)
        ]
        yield GAP.join(padded).rstrip()


def shortened(text: str | None, width: int) -> str | None:
    """Return `text`, cut to `width` characters if it is longer."""
    return text if text is None or len(text) <= width else f"{text[: width - 1]}…"


def cropped(text: str, width: int) -> str:
    """Return `text`, cut in the middle to `width` characters if it is longer: ids end in a draw."""
    if len(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    return f"{text[: max(0, width - 1) - tail]}…{text[len(text) - tail :]}"


def narrowed(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, spare: Iterable[str]
) -> tuple[Sequence[str], Sequence[Sequence[Cell]]]:
    """Return as much of a table as `width` characters hold: without the first columns of `spare`.

    What is not spare stays, even where it is too wide.
    """
    for name in spare:
        if max(map(len, table(header, rows))) <= width:
            break
        place = header.index(name)
        header = (*header[:place], *header[place + 1 :])
        rows = [(*row[:place], *row[place + 1 :]) for row in rows]
    return header, rows


def _text(cell: Cell) -> str:
    return UNKNOWN if cell is None else str(cell)
