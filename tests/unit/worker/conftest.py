"""A house whose ranks are gone when a test ends."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import House

from muster.processes import marked


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.nursery.send_all(signal.SIGKILL)
    house.lives_until_it_is_empty()
    assert marked(f"{house.uid}/") == []
    house.close()
