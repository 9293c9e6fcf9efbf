"""What is said is written, or it is said that it will not be."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

import pytest

from cli.outlet import Outlet

LINES = "\n".join(f"line {number} of ü" for number in range(50_000))
"""Many times what a pipe holds."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The end to read from, and one to write to that does not wait."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(writing, "w", encoding="utf-8") as output:  # noqa: PTH123  a descriptor has no path
        yield reading, output


def test_what_does_not_fit_waits_for_room(pipe: tuple[int, TextIO]) -> None:
    reading, output = pipe
    with ThreadPoolExecutor(1) as pool, open(reading, encoding="utf-8") as reader:  # noqa: PTH123
        said = pool.submit(Outlet(output, pytest.fail).say, LINES)
        heard = [reader.readline() for _ in range(LINES.count("\n") + 1)]
        said.result()
    assert "".join(heard) == f"{LINES}\n"


def test_that_nobody_reads_any_more_is_said_once(pipe: tuple[int, TextIO]) -> None:
    reading, output = pipe
    remarks: list[str] = []
    outlet = Outlet(output, remarks.append)
    os.close(reading)
    outlet.say("one")
    outlet.say("two")
    assert len(remarks) == 1
    assert "in their logs alone from now on" in remarks[0]
    assert "Broken pipe" in remarks[0]


def test_an_output_that_is_closed_or_none_is_spoken_to_in_vain() -> None:
    Outlet(None, pytest.fail).say("one")
    remarks: list[str] = []
    closed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    closed.close()
    Outlet(closed, remarks.append).say("one")
    assert len(remarks) == 1
