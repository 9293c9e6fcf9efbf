"""A stage with one agent, and shards for ranks that train."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_stage import Stage

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    write_dataset(tmp_path / "shards", synthetic(samples=64, shards=4))
    stage = Stage(tmp_path)
    yield stage
    stage.close()
