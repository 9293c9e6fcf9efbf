"""A search through a log ends, and says if it ended too early."""

from pathlib import Path

import pytest

from api.logs import tail as tails
from api.logs.tail import LINE_COST_BYTES, Wanted, tail, tail_position
from muster.contracts.layout import TIME_MARK, JobFiles


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFiles:
    """Ten numbered lines, of which a search may look at four."""
    monkeypatch.setattr(tails, "SEARCH_LIMIT_BYTES", 4 * LINE_COST_BYTES)
    found = JobFiles(tmp_path)
    found.logs.mkdir()
    found.log(0, 0).write_text("".join(f"line {number}\n" for number in range(10)))
    return found


@pytest.mark.parametrize(
    ("text", "count", "lines", "is_complete"),
    [
        (None, 2, ["line 8", "line 9"], True),
        (None, 4, ["line 6", "line 7", "line 8", "line 9"], True),
        ("line 7", 1, ["line 7"], True),
        ("line 7", 2, ["line 7"], False),
        ("line 1", 1, [], False),
    ],
)
def test_a_search_that_gives_up_says_so(
    files: JobFiles, text: str | None, count: int, lines: list[str], *, is_complete: bool
) -> None:
    found = tail(files, Wanted(text=text), count)
    assert [line.line.text for line in found.lines] == lines
    assert found.is_complete is is_complete


def test_a_log_that_is_short_is_looked_through(files: JobFiles) -> None:
    files.log(0, 0).write_text("one\ntwo\nthree\nfour\n")
    assert tail(files, Wanted(text="none"), 5).is_complete


def test_an_unfinished_line_belongs_to_what_was_written_by_then(files: JobFiles) -> None:
    files.log(0, 0).write_text("one\ntwo")
    files.times(0, 0).write_bytes(TIME_MARK.pack(5, 100) + TIME_MARK.pack(7, 200))
    early, late = (tail(files, Wanted(until=micros), 9) for micros in (100, 200))
    assert [line.line.text for line in early.lines] == ["one"]
    assert [line.line.text for line in late.lines] == ["one", "two"]


def test_a_place_for_the_last_lines_is_not_looked_for_without_end(files: JobFiles) -> None:
    assert tail_position(files, 0, 3) == {0: (0, 7 * len("line 0\n"))}
    files.log(0, 0).write_text(f"{'long' * LINE_COST_BYTES}\n" * 3)
    assert tail_position(files, 0, 3) == {0: (0, 2 * (4 * LINE_COST_BYTES + 1))}


def test_the_lines_behind_a_place_in_a_long_one_begin_there(files: JobFiles) -> None:
    found = tail(files, Wanted(after={0: (0, 59)}), 3)
    assert [line.line.text for line in found.lines] == ["e 8", "line 9"]
