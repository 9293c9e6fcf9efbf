"""When a byte was written, looked up in the marks beside a log."""

from pathlib import Path

import pytest

from api.logs.times import TimeIndex
from muster.contracts.layout import TIME_MARK

MARKS = [(10, 100), (10, 150), (25, 200), (40, 300)]


@pytest.mark.parametrize(
    ("end", "expected"),
    [(1, 100), (10, 100), (11, 200), (25, 200), (26, 300), (40, 300), (41, None)],
)
def test_the_first_mark_that_covers_a_line_dates_it(
    tmp_path: Path, end: int, expected: int | None
) -> None:
    path = tmp_path / "times"
    path.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in MARKS) + b"torn")
    assert TimeIndex(path).at(end) == expected


def test_a_mark_that_comes_later_is_found_later(tmp_path: Path) -> None:
    path = tmp_path / "times"
    index = TimeIndex(path)
    assert index.at(5) is None
    path.write_bytes(TIME_MARK.pack(10, 100))
    assert [index.at(5), index.at(10), index.at(11)] == [100, 100, None]


@pytest.mark.parametrize(
    ("micros", "size"), [(99, 0), (100, 10), (199, 10), (200, 25), (299, 25), (999, 40)]
)
def test_the_last_mark_until_then_says_how_much_was_written(
    tmp_path: Path, micros: int, size: int
) -> None:
    path = tmp_path / "times"
    path.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in MARKS) + b"torn")
    assert TimeIndex(path).size_at(micros) == size


def test_without_marks_nothing_is_known_to_have_been_written(tmp_path: Path) -> None:
    assert TimeIndex(tmp_path / "times").size_at(999) == 0


def test_any_order_of_questions_has_the_same_answers(tmp_path: Path) -> None:
    path = tmp_path / "times"
    marks = [(7 * number, number) for number in range(1, 1000)]
    path.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in marks))
    index = TimeIndex(path)
    for end in (1, 7, 8, 3500, 6993, 6994, 900, 901, 3000, 1, 6994):
        expected = -(-end // 7) if end <= 6993 else None
        assert index.at(end) == expected
