"""The samples that computer are computed of."""

from collections.abc import Iterator

import pytest

from muster.datasets.random_access import RandomAccess
from muster.datasets.reader import find_shards
from tests.support.small_shares import SAMPLES
from tests.support.stage import write_samples


@pytest.fixture(scope="session")
def drawer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RandomAccess]:
    with RandomAccess(
        find_shards(write_samples(tmp_path_factory.mktemp("data"), SAMPLES))
    ) as drawer:
        yield drawer
