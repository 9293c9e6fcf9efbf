"""A disk that has room for no other file: said as that, for SQLite writes with a file beside."""

from pathlib import Path

import pytest
from scarcity import allow_no_more_files, small_disk
from store_samples import submit

from store.database import Database
from store.errors import StoreUnavailable
from store.jobs import Jobs


def test_a_disk_that_holds_no_more_files_is_not_a_matter_of_permissions(tmp_path: Path) -> None:
    disk = tmp_path / "small"
    with small_disk(disk):
        database = Database.open(f"sqlite:///{disk}/muster.db")
        job = submit(Jobs(database), "before")
        allow_no_more_files(disk)
        with pytest.raises(StoreUnavailable, match="no room for another file") as refused:
            submit(Jobs(database), "after")
        assert "permissions" not in str(refused.value)
        assert Jobs(database).get(job.job_id) == job
        database.close()
