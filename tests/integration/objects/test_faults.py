"""A short run of the harness, and that it notices a store that breaks its promise."""

from pathlib import Path

import pytest

from muster.contracts.location import S3Location
from stress.objects import History, run


@pytest.mark.slow
def test_no_wrong_latest_despite_faults(tmp_path: Path) -> None:
    assert run(tmp_path, operations=100, seed=1).faults == []


@pytest.mark.long
@pytest.mark.slow
def test_the_harness_notices_a_store_without_conditions(place: S3Location) -> None:
    def ignore(_operation: str, headers: dict[str, str]) -> None:
        headers.pop("If-Match", None)

    # A history may be too short for a replaced writer that gets through the other faults.
    histories = [History(place / str(seed), seed) for seed in range(4)]
    committed = "a replaced writer has committed"
    for history in histories:
        history.play(50, ignore)
        if any(committed in fault for fault in history.faults):
            return
    pytest.fail("no replaced writer has committed")
