"""A short run of the harness, and that it notices a store that breaks its promise."""

from pathlib import Path

import pytest

from muster.contracts.location import S3Location
from stress.objects import History, run


@pytest.mark.slow
def test_no_wrong_latest_despite_faults(tmp_path: Path) -> None:
    assert run(tmp_path, operations=200, seed=1).faults == []


@pytest.mark.slow
def test_the_harness_notices_a_store_without_conditions(place: S3Location) -> None:
    def ignore(_operation: str, headers: dict[str, str]) -> None:
        headers.pop("If-Match", None)

    history = History(place, seed=1)
    history.play(50, ignore)
    assert any("a replaced writer has committed" in fault for fault in history.faults)
