"""The last lines of a job, found within a limit."""

from pathlib import Path

import pytest

from api.logs import tail
from api.logs.tail import LINE_COST_BYTES, LogFilter, read_tail, tail_position
from muster.contracts.paths import TIME_MARK, JobFiles


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFiles:
    """Ten numbered lines, of which a search may read four."""
    monkeypatch.setattr(tail, "SEARCH_LIMIT_BYTES", 4 * LINE_COST_BYTES)
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
def test_a_search_that_stops_early_is_incomplete(
    files: JobFiles, text: str | None, count: int, lines: list[str], *, is_complete: bool
) -> None:
    found = read_tail(files, LogFilter(text=text), count)
    assert [line.line.text for line in found.lines] == lines
    assert found.is_complete is is_complete


def test_a_short_log_is_searched_completely(files: JobFiles) -> None:
    files.log(0, 0).write_text("one\ntwo\nthree\nfour\n")
    assert read_tail(files, LogFilter(text="none"), 5).is_complete


def test_until_includes_an_unfinished_line(files: JobFiles) -> None:
    files.log(0, 0).write_text("one\ntwo")
    files.times(0, 0).write_bytes(TIME_MARK.pack(5, 100) + TIME_MARK.pack(7, 200))
    early, late = (read_tail(files, LogFilter(until=micros), 9) for micros in (100, 200))
    assert [line.line.text for line in early.lines] == ["one"]
    assert [line.line.text for line in late.lines] == ["one", "two"]


def test_a_tail_position_is_searched_within_the_limit(files: JobFiles) -> None:
    assert tail_position(files, 0, 3) == {0: (0, 7 * len("line 0\n"))}
    files.log(0, 0).write_text(f"{'long' * LINE_COST_BYTES}\n" * 3)
    assert tail_position(files, 0, 3) == {0: (0, 2 * (4 * LINE_COST_BYTES + 1))}


def test_a_position_inside_a_line_starts_there(files: JobFiles) -> None:
    found = read_tail(files, LogFilter(after={0: (0, 59)}), 3)
    assert [line.line.text for line in found.lines] == ["e 8", "line 9"]
