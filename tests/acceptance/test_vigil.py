"""A short version of `stress/vigil.py`: every fault is detected, without false alarms."""

from pathlib import Path

from stress.vigil import keep_vigil

KILLS = 5
FREEZES = 2


def test_dead_and_frozen_ranks_are_replaced_slow_ones_are_not(
    tmp_path: Path,
) -> None:
    report = keep_vigil(
        tmp_path, kills=KILLS, freezes=FREEZES, minutes=0.1, seed=1, say=lambda _line: None
    )
    assert [len(row.seconds) for row in report.rows] == [KILLS, FREEZES]
    assert not report.alarms, "\n".join(report.lines())
