"""Tails of local logs are searched within a limit."""

from pathlib import Path

import pytest

from muster.contracts.paths import JobFiles
from muster.logs import local
from muster.logs.local import LINE_COST_BYTES, LocalLogs
from muster.logs.source import LogFilter
from tests.support.logs import JobLogs


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobLogs:
    """Ten numbered lines, of which a search may read four."""
    monkeypatch.setattr(local, "SEARCH_LIMIT_BYTES", 4 * LINE_COST_BYTES)
    found = JobLogs(JobFiles(tmp_path))
    found.write(0, "".join(f"line {number}\n" for number in range(10)))
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
    logs: JobLogs, text: str | None, count: int, lines: list[str], *, is_complete: bool
) -> None:
    found = LocalLogs(logs.files).tail(LogFilter(text=text), count)
    assert [line.text for line in found.lines] == lines
    assert found.is_complete is is_complete


def test_a_short_log_is_searched_completely(logs: JobLogs) -> None:
    logs.files.log(0, 0).write_text("one\ntwo\nthree\nfour\n")
    assert LocalLogs(logs.files).tail(LogFilter(text="none"), 5).is_complete


def test_a_tail_position_is_searched_within_the_limit(logs: JobLogs) -> None:
    logs.files.log(0, 0).write_text(f"{'long' * LINE_COST_BYTES}\n" * 3)
    place = 2 * (4 * LINE_COST_BYTES + 1)
    assert LocalLogs(logs.files).tail_position(0, 3) == {0: (0, place)}
