"""What an installation and its jobs leave can be read by their user alone."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.installation import (
    Installation,
    has_saved,
    is_running,
    pids,
    write_small_dataset,
)

USER_MASK = 0o001
"""A careless one that nothing sets by itself."""


@pytest.fixture
def careless(tmp_path: Path) -> Iterator[Installation]:
    """An installation whose services start with a careless umask."""
    write_small_dataset(tmp_path / "shards")
    before = os.umask(USER_MASK)
    try:
        with Installation(tmp_path) as installation:
            yield installation
    finally:
        os.umask(before)


def test_a_careless_umask_opens_no_file_and_programs_keep_it(careless: Installation) -> None:
    command = careless.submit(command=["sleep", "1000"], world_size=1)
    endless = {"epochs": 1_000_000, "sleep_sec": 0.02, "checkpoint_every": 1}
    managed = careless.submit(mode="independent", world_size=1, **endless)
    ranks = [
        pids(careless.wait_until(command, is_running))[0],
        pids(careless.wait_until(managed, has_saved))[0],
    ]
    for pid in ranks:
        assert f"Umask:\t{USER_MASK:04o}\n" in Path(f"/proc/{pid}/status").read_text()
    careless.stop(managed)
    careless.complete(careless.submit(mode="synchronous", world_size=2))
    # find(1) passes over files that are removed meanwhile.
    search = ["find", careless.files.root, "-ignore_readdir_race", "-perm", "/077"]
    assert not subprocess.run(search, check=True, stdout=subprocess.PIPE, text=True).stdout
