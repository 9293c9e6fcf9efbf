"""Tails of local logs are searched within a limit."""

from pathlib import Path

import pytest

from muster.contracts.settings.paths import JobFiles
from muster.logs import local
from muster.logs.local import LINE_COST_BYTES, LocalLogs
from muster.logs.source import LogFilter
from tests.support.logs import JobLogs


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobLogs:
    """Logs of which a search may read four lines."""
    monkeypatch.setattr(local, "SEARCH_LIMIT_BYTES", 4 * LINE_COST_BYTES)
    return JobLogs(JobFiles(tmp_path))


@pytest.mark.parametrize(
    ("text", "written", "count", "lines", "is_complete"),
    [
        (None, 10, 2, ["line 8", "line 9"], True),
        (None, 10, 4, ["line 6", "line 7", "line 8", "line 9"], True),
        ("line 7", 10, 1, ["line 7"], True),
        ("line 7", 10, 2, ["line 7"], False),
        ("line 1", 10, 1, [], False),
        ("line 7", 4, 1, [], True),
    ],
)
def test_a_search_that_stops_early_is_incomplete(
    logs: JobLogs,
    text: str | None,
    written: int,
    count: int,
    lines: list[str],
    *,
    is_complete: bool,
) -> None:
    logs.write(0, "".join(f"line {number}\n" for number in range(written)))
    found = LocalLogs(logs.files).tail(LogFilter(text=text), count)
    assert [line.text for line in found.lines] == lines
    assert found.is_complete is is_complete


def test_a_tail_position_is_searched_within_the_limit(logs: JobLogs) -> None:
    line = "long" * LINE_COST_BYTES
    logs.write(0, f"{line}\n" * 3)
    assert LocalLogs(logs.files).tail_position(0, 3) == {0: (0, 2 * (len(line) + 1))}
