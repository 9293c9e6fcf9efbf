"""A short run of the harness; `stress/containment` says what it does."""

from pathlib import Path

from stress.containment.__main__ import contain, faults, table


def test_what_a_rank_started_ends_with_it_and_nobody_else_does(tmp_path: Path) -> None:
    outcomes = contain(20, seed=4, root=tmp_path)
    assert sum(one.decoys for several in outcomes.values() for one in several) > 100
    assert faults(outcomes) == [], "\n".join(table(outcomes))
