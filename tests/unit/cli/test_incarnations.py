"""What a person reads of a job's processes: all of it, as wide as there is room."""

from typing import Any

from summaries import RANK, summary

from cli.incarnations import lines

FAILED = {
    "job_id": "points",
    "status": "FAILED",
    "reason": "no_progress",
    "message": "rank 0 failed; its log:\n  Traceback\n    line 3",
}
ENDED: dict[str, Any] = {
    "rank": 0,
    "incarnation": 0,
    "pid": 7,
    "started_at": "2026-03-01T12:00:00Z",
    "ended_at": "2026-03-01T12:00:04Z",
    "step_at_start": None,
    "step_at_end": None,
    "retry_class": "crash",
    "message": "exited with code 1 (/a/very/long/path/to/train.py, line 12: NameError: name 'x')",
}


def test_the_job_comes_first_and_nothing_is_cut_where_there_is_no_terminal() -> None:
    assert list(lines(summary(**FAILED), [ENDED], None)) == [
        "points is FAILED (no_progress): rank 0 failed; its log:",
        "  Traceback",
        "    line 3",
        "rank  process  pid  started (UTC)   seconds  steps  class",
        "   0        0    7  03-01 12:00:00        4  -      crash",
        f"      {ENDED['message']}",
    ]


def test_a_terminal_gets_lines_that_fit_and_every_word() -> None:
    shown = list(lines(summary(**FAILED), [ENDED], 60))
    assert shown[-2:] == [
        "      exited with code 1 (/a/very/long/path/to/train.py,",
        "      line 12: NameError: name 'x')",
    ]
    assert max(map(len, shown)) <= 60


def test_a_job_without_processes_says_so() -> None:
    assert list(lines(summary(status="QUEUED"), [], 80)) == ["a is QUEUED", "none yet"]
    stopped = list(lines(summary(status="STOPPED"), [], 80))
    assert stopped == ["a is STOPPED", "it had no process"]


def test_who_lives_has_come_as_far_as_it_says() -> None:
    lives = {**ENDED, "ended_at": None, "retry_class": None, "message": None}
    found = [
        {**lives, "incarnation": 2, "step_at_start": None},
        {**lives, "incarnation": 1, "step_at_start": 5},
        {**lives, "rank": 1, "step_at_start": 5},
    ]
    workers = [{**RANK, "worker_id": name, "step": 9} for name in ("0.1", "0.2")]
    _, _, *rows = lines(summary(workers=workers), found, None)
    assert [row.split()[6:] for row in rows] == [
        ["-", "lives"],
        ["5", "to", "9", "lives"],
        ["5", "to", "-", "lives"],
    ]
