"""The time index of a log: from bytes to times and back."""

from pathlib import Path

import pytest

from api.logs.files import TimeIndex
from muster.contracts.paths import TIME_MARK

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
