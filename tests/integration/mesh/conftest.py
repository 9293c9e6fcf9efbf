"""What tests of a household have in common."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.networks import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with ExitStack() as ending:
        yield Home(tmp_path, ending)
