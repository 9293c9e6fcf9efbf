"""Places in logs: event ids, the time of each byte, and the last lines within a limit."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.logs import tail
from api.logs.files import (
    LINE_LIMIT_BYTES,
    PIECE_BYTES,
    TimeIndex,
    format_event_id,
    parse_event_id,
)
from api.logs.tail import LINE_COST_BYTES, LogFilter, read_tail, tail_position
from muster.contracts.job import JobUid
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


@pytest.mark.parametrize("place", [0, LINE_LIMIT_BYTES, PIECE_BYTES - 4, 3 * PIECE_BYTES - 1])
@pytest.mark.parametrize("end", ["", "\n", "x\nlast\n"])
def test_text_is_found_anywhere_in_a_long_line(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch, place: int, end: str
) -> None:
    monkeypatch.setattr(tail, "SEARCH_LIMIT_BYTES", 1 << 30)
    log = f"first\n{'x' * place}Straße{'x' * (3 * PIECE_BYTES - place)}{end}"
    files.log(0, 0).write_text(log)
    (found,) = read_tail(files, LogFilter(text="Straße"), 5).lines
    assert found.line.start <= 6 + place < found.line.end
    assert read_tail(files, LogFilter(text="Strasse"), 5).lines == []


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


# Event ids

UID = JobUid("6f1c2ab9" + "0" * 24)

POSITIONS = st.dictionaries(
    st.integers(0, 4095), st.tuples(st.integers(0, 10**6), st.integers(0, 10**17)), min_size=1
)


@pytest.mark.slow
@given(position=POSITIONS)
def test_a_position_survives_formatting(position: dict[int, tuple[int, int]]) -> None:
    assert parse_event_id(format_event_id(UID, position)) == ("6f1c2ab9", position)


def test_a_position_without_a_job_fits_every_job() -> None:
    assert parse_event_id("0.2:4096") == ("", {0: (2, 4096)})


def test_the_empty_position_is_not_an_empty_id() -> None:
    text = format_event_id(UID, {})
    assert text == "6f1c2ab9/0.0:0"
    assert parse_event_id(text) == ("6f1c2ab9", {0: (0, 0)})


# Times

MARKS = [(10, 100), (10, 150), (25, 200), (40, 300)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "times"
    path.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in MARKS) + b"torn")
    return path


@pytest.mark.parametrize(
    ("end", "expected"),
    [(1, 100), (10, 100), (11, 200), (25, 200), (26, 300), (40, 300), (41, None)],
)
def test_a_line_has_the_time_of_the_first_mark_after_it(
    path: Path, end: int, expected: int | None
) -> None:
    assert TimeIndex(path).at(end) == expected


def test_a_mark_that_is_added_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "times"
    index = TimeIndex(path)
    assert index.at(5) is None
    path.write_bytes(TIME_MARK.pack(10, 100))
    assert [index.at(5), index.at(10), index.at(11)] == [100, 100, None]


@pytest.mark.parametrize(
    ("micros", "size"), [(99, 0), (100, 10), (199, 10), (200, 25), (299, 25), (999, 40)]
)
def test_the_size_at_a_time_is_that_of_the_mark_before(path: Path, micros: int, size: int) -> None:
    assert TimeIndex(path).size_at(micros) == size


def test_without_marks_the_size_is_unknown(tmp_path: Path) -> None:
    assert TimeIndex(tmp_path / "times").size_at(999) == 0


def test_lookups_in_any_order_give_the_same_times(path: Path) -> None:
    marks = [(7 * number, number) for number in range(1, 1000)]
    path.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in marks))
    index = TimeIndex(path)
    for end in (1, 7, 8, 3500, 6993, 6994, 900, 901, 3000, 1, 6994):
        assert index.at(end) == (-(-end // 7) if end <= 6993 else None)
