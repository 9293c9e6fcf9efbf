"""A short run of the harness; `stress/containment` says what it does."""

from pathlib import Path

from stress.containment.__main__ import run


def test_what_a_rank_started_ends_with_it_and_nothing_else(tmp_path: Path) -> None:
    report = run(tmp_path, trials=12, seed=4)
    assert not report.faults, report
