"""A machine stands still, another takes over its jobs, and it goes on: nothing of it counts.

The long version is ``python -m stress.stale``.
"""

from pathlib import Path

import pytest

from stress.stale.__main__ import run
from stress.stale.jobs import KINDS
from tests.support.frozen_hosts import can_be_had

GENEROUS_SECONDS = 60.0
"""For whoever wakes up to be gone: how soon it is, the long version measures."""


@pytest.mark.skipif(not can_be_had(), reason="no name spaces can be made here")
def test_what_wakes_up_on_a_machine_that_was_replaced_exits_and_changes_nothing(
    tmp_path: Path,
) -> None:
    findings = run(
        tmp_path,
        wakings=1,
        seed=3,
        minutes=20.0,
        tell=lambda _: None,
        in_time_seconds=GENEROUS_SECONDS,
        epochs=60,
    )
    assert findings.breaches == []
    assert findings.completed >= len(KINDS)
    assert {waking.what for waking in findings.wakings} == {*KINDS, "agent", "coordinator"}
