"""A request whose reply was lost can be repeated: one key makes one job."""

from pathlib import Path

from stress import lost_replies


def test_retries_are_safe_while_the_api_is_killed_again_and_again(tmp_path: Path) -> None:
    report = lost_replies.run(tmp_path, keys=40, duplicates=3, kills=3, seed=1)
    assert not report.faults, report
    assert report.kills
    assert report.without_reply
