"""Every line is in the stream in order and once, whichever process is killed."""

from pathlib import Path

from stress import log_gaps
from tests.support.installation import Installation


def test_readers_who_come_back_get_every_line_once(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:  # its API is killed, and restarted by itself
        report = log_gaps.run(installation, deaths=7, seed=5, jobs=1)
    assert not report.faults, report
    assert report.resumed
    assert report.lines
