"""A stage with one agent, and shards for ranks that train; a loop whose ranks end with a test."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.host.containment import tagged_processes
from tests.support.agent_stage import Stage
from tests.support.table_loop import TableLoop


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    write_dataset(tmp_path / "shards", synthetic(samples=64, shards=4))
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[TableLoop]:
    loop = TableLoop(tmp_path)
    yield loop
    loop.ranks.signal_all(signal.SIGKILL)
    loop.run_until_empty()
    assert tagged_processes(f"{loop.uid}/") == []
    loop.close()
