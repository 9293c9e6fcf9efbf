"""A short version of `stress/vigil.py`: every fault is seen, and nobody else is blamed."""

from pathlib import Path

from stress.vigil import keep_vigil

KILLS = 5
FREEZES = 2


def test_whoever_dies_or_freezes_is_replaced_and_whoever_is_only_slow_is_not(
    tmp_path: Path,
) -> None:
    report = keep_vigil(
        tmp_path, kills=KILLS, freezes=FREEZES, minutes=0.1, seed=1, say=lambda _line: None
    )
    assert [len(row.seconds) for row in report.rows] == [KILLS, FREEZES]
    assert not report.alarms, "\n".join(report.lines())
