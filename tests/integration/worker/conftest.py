"""A stage with one agent, and shards for ranks that train; a house whose ranks end with a test."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.host.containment import tagged_processes
from tests.support.agent_stage import Stage
from tests.support.house import House


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    write_dataset(tmp_path / "shards", synthetic(samples=64, shards=4))
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.ranks.signal_all(signal.SIGKILL)
    house.lives_until_it_is_empty()
    assert tagged_processes(f"{house.uid}/") == []
    house.close()
