"""Real processes that copy a database, killed and on a full disk."""

from pathlib import Path

import pytest

from stress.copy_kills import run


@pytest.mark.slow
def test_kills_lose_no_acknowledged_row(tmp_path: Path) -> None:
    assert run(tmp_path, kills=10, seed=1).faults == []
