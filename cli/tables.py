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


def _text(cell: Cell) -> str:
    return UNKNOWN if cell is None else str(cell)
