"""The database goes away for some seconds: training goes on, and everything is told once."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from database_away import locked, ways
from fragile_postgres import FragilePostgres, fragile_postgres
from installation import Installation
from outage import endure
from peace import Peace

SECONDS = 2.0
"""`tests/outage.py` does it for as long as you like."""


@pytest.fixture(scope="module")
def server() -> Iterator[FragilePostgres]:
    with fragile_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def remote(
    tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path, server: FragilePostgres
) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("remote")
    environment = {"MUSTER_DATABASE_URL": server.url, "DATASET_DIR": str(dataset_dir)}
    with Installation(root, **environment) as installation:
        yield installation


@pytest.fixture(scope="module")
def peace(remote: Installation) -> Peace:
    return Peace(remote)


@pytest.mark.postgres
@pytest.mark.parametrize("way", ["killed", "stopped", "cut"])
def test_no_job_notices_a_server_that_goes_away(
    way: str, server: FragilePostgres, remote: Installation, peace: Peace
) -> None:
    _endures(remote, way, ways(server)[way], peace)


def test_no_job_notices_that_the_database_is_locked(installation: Installation) -> None:
    _endures(installation, "locked", lambda: locked(installation), Peace(installation))


def test_nor_that_its_coordinator_dies_meanwhile(installation: Installation) -> None:
    _endures(
        installation, "locked", lambda: locked(installation), Peace(installation), ["coordinator"]
    )


def _endures(
    installation: Installation,
    way: str,
    outage: Callable[[], AbstractContextManager[None]],
    peace: Peace,
    dying: Collection[str] = (),
) -> None:
    figures = endure(installation, way, outage, SECONDS, peace, dying)
    assert not figures.faults, figures
