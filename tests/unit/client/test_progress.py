"""Progress as one line, redrawn on a terminal."""

from io import StringIO

import pytest

from muster.client.progress import QUIET_SECONDS, Progress, duration, line_of
from tests.support.summaries import summary

UNKNOWN = {
    "step": 0,
    "total_steps": None,
    "throughput_steps_per_sec": 0.0,
    "eta_seconds": None,
    "loss": None,
    "restarts": 0,
}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_shows_what_is_known() -> None:
    assert line_of(summary()) == (
        "a  RUNNING  step 5/20  loss 0.2500  2.5/s  ETA 1m15s  0/2 ranks  1 restart"
    )
    assert line_of(summary(**UNKNOWN)) == "a  RUNNING  0/2 ranks"
    assert line_of(summary(**UNKNOWN, status="COMPLETED")) == "a  COMPLETED"


@pytest.mark.parametrize("status", ["QUEUED", "STARTING", "RECOVERING", "PAUSED", "STOPPING"])
def test_the_reason_replaces_the_speed(status: str) -> None:
    said = line_of(summary(status=status, message="rank 1 was killed\n  its log"))
    assert said == f"a  {status}  step 5/20  0/2 ranks  1 restart  rank 1 was killed"


def test_control_characters_are_escaped() -> None:
    said = line_of(summary(**UNKNOWN, status="QUEUED", message="no \x1b]0;owned\x07 here"))
    assert said == r"a  QUEUED  0/2 ranks  no \x1b]0;owned\x07 here"


def test_a_line_fits_80_columns() -> None:
    far = {"step": 100_000, "total_steps": 128_000, "throughput_steps_per_sec": 100.5}
    large = summary(**far, job_id="a" * 63, eta_seconds=8_300, restarts=12, world_size=8)
    assert line_of(large, 79) == (
        "RUNNING  100000/128000  loss 0.2500  100.5/s  ETA 2h18m  0/8 ranks  12 restarts"
    )
    assert len(line_of(large, 60)) == 60
    assert line_of(large, 60).endswith("…")
    assert line_of(summary(job_id="b" * 63), 79).startswith("RUNNING  step 5/20")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0s"),
        (59.6, "1m0s"),
        (3_599, "59m59s"),
        (7_260, "2h1m"),
        (90_000, "1d1h"),
        (-1.0, "0s"),
    ],
)
def test_a_duration_has_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_terminal_is_redrawn_within_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    progress = Progress(out, lambda: 0.0)
    for step in (1, 1, 2):
        progress.draw(summary(step=step))
    progress.draw(summary(step=3), is_last=True)
    progress.close()
    assert out.getvalue().count("\n") == 1
    drawn = out.getvalue().rstrip("\n").split("\r")[1:]
    assert drawn == [
        "RUNNING  1/20  los…\x1b[K",
        "RUNNING  2/20  los…\x1b[K",
        "RUNNING  3/20  los…\x1b[K",
    ]


def test_a_file_gets_a_plain_line_at_intervals() -> None:
    out, now = StringIO(), [0.0]
    progress = Progress(out, lambda: now[0])
    for step in range(1, 8):
        progress.draw(summary(step=step))
        now[0] += QUIET_SECONDS / 3
    progress.draw(summary(step=9), is_last=True)
    progress.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["1/20", "4/20", "7/20", "9/20"]
    assert "\x1b" not in out.getvalue()
