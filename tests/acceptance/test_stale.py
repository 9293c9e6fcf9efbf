"""A frozen host is replaced and resumes: nothing on it may have an effect.

The long version is ``python -m stress.stale``.
"""

from pathlib import Path

import pytest

from stress.stale.__main__ import run
from stress.stale.jobs import KINDS
from tests.support.frozen_hosts import can_be_had

GENEROUS_SECONDS = 60.0
"""For resumed processes to exit; the long version measures how soon."""


@pytest.mark.skipif(not can_be_had(), reason="no name spaces can be made here")
def test_resumed_stale_processes_exit_and_change_nothing(
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
