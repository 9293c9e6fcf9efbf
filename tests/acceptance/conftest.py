"""Installations, data small enough to go through in a second, and what undisturbed runs give."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from installation import Installation, Undisturbed

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = _installed(tmp_path_factory.mktemp("shared"))
    installation.start()
    yield installation
    installation.close()


@pytest.fixture
def installation(_shared: Installation) -> Iterator[Installation]:
    """An installation that tests share; they leave its services as they are."""
    yield _shared
    _shared.end_jobs()


@pytest.fixture
def own_installation(tmp_path: Path) -> Iterator[Installation]:
    """An installation for tests that end its services."""
    installation = _installed(tmp_path)
    installation.start()
    yield installation
    installation.close()


@pytest.fixture(scope="session")
def undisturbed(_shared: Installation) -> Undisturbed:
    """Run a job in peace, once per description, and return its digests."""
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


def _installed(root: Path) -> Installation:
    installation = Installation(root)
    # 8 shards of 64 lines: of two ranks each takes 16 steps a pass.
    write_dataset(installation.dataset_dir, synthetic(samples=512, shards=8, features=8, classes=3))
    return installation
