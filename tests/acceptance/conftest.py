"""Shared installations, a small data set, and the results of undisturbed jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from tests.support.installation import SLOTS, Installation, Undisturbed, await_value, lent
from tests.support.terminals import Terminal


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 shards of 64 lines: of two ranks each takes 16 steps a pass."""
    directory = tmp_path_factory.mktemp("data") / "shards"
    write_dataset(directory, synthetic(samples=512, shards=8, features=8, classes=3))
    return directory


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("shared")
    with Installation(root, DATASET_DIR=str(dataset_dir)) as installation:
        yield installation


@pytest.fixture
def installation(_shared: Installation) -> Iterator[Installation]:
    """An installation that tests share, one after the other: they may end its services."""
    yield from lent(_shared)


@pytest.fixture(scope="session")
def _narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("narrow"), MUSTER_SLOTS=str(SLOTS)) as installation:
        yield installation


@pytest.fixture
def narrow(_narrow: Installation) -> Iterator[Installation]:
    """An installation with few slots and no data set."""
    yield from lent(_narrow)


@pytest.fixture(scope="session")
def undisturbed(_shared: Installation) -> Undisturbed:
    """Run each kind of job once without faults; return its digests."""
    known: dict[str, list[str]] = {}

    def run(**fields: object) -> list[str]:
        # A pause between steps changes no bit, so the reference does without.
        fields.pop("sleep_sec", None)
        key = repr(sorted(fields.items()))
        if key not in known:
            job_id = _shared.submit(**fields)
            seen = _shared.complete(job_id)
            assert seen["restarts"] == 0
            known[key] = _shared.digests(job_id, fields["world_size"])
        return known[key]

    return run


@pytest.fixture
def terminal(tmp_path: Path, dataset_dir: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, dataset_dir)
    yield terminal
    for process in terminal.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    await_value(lambda: not terminal.left_running(), lambda: f"{terminal.left_running()} are left")
