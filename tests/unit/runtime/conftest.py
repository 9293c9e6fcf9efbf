"""The agent of a rank in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import Agents
from tests.support.ranks import Ear


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()
