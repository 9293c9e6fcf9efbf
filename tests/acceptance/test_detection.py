"""A short version of `stress/detection.py`: every fault is detected, without false alarms."""

from pathlib import Path

from stress import detection


def test_dead_and_frozen_ranks_are_replaced_slow_ones_are_not(tmp_path: Path) -> None:
    report = detection.run(tmp_path, kills=4, freezes=1, minutes=0.05, seed=1)
    assert not [fault for fault in report.faults if "goal is missed" not in fault], report
