"""An installation of 0.1.0 is taken over; of builds before it, their checkpoints.

`tests.support.baseline` has written `data/0.1.0.tar.xz`. `data/before-0.1.0.tar.xz` holds the
checkpoints and the data set, with its indexes, of two jobs that build b72b293 had interrupted.
"""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from muster.checkpoints.comparison import identity_of
from muster.contracts.settings.paths import checkpoints_of_job
from tests.support.baseline import ANY_PROCESSOR, INDEPENDENT, SYNCHRONOUS, extract
from tests.support.installation import Installation, newest_checkpoint

DATA = Path(__file__).parent / "data"

TOGETHER = "03674a00f53896f9792b63e65154cff7476b74773072087346b0ba59beb96b96"
APART = [
    "3b8a836d535b319e369ea9e0355212465877d3fb84acd70e35bfed886e3fc426",
    "156f8f3345d1d56d1a297c185b430ea7c57d3f0c9caaf60d8d3525523e4846c0",
]
"""Digests of the two jobs from before 0.1.0, when build be5da5dc had completed them."""


def move_rows(database: Path, old_root: str, root: Path) -> None:
    """Move the paths in the rows of a database that was made elsewhere."""
    with closing(sqlite3.connect(database)) as opened, opened:
        columns = opened.execute(
            "select m.name, p.name from sqlite_master m, pragma_table_info(m.name) p "
            "where m.type = 'table' and upper(p.type) in ('TEXT', 'JSON', 'BLOB', 'VARCHAR')"
        ).fetchall()
        for table, column in columns:
            opened.execute(
                f"update {table} set {column} = replace({column}, ?, ?) "  # noqa: S608  names of our schema
                f"where {column} like ?",
                (old_root, str(root), f"%{old_root}%"),
            )


@pytest.mark.parametrize("release", ["0.1.0"])
def test_the_installation_of_a_release_is_taken_over(tmp_path: Path, release: str) -> None:
    facts = extract(DATA / f"{release}.tar.xz", tmp_path)
    move_rows(tmp_path / "data" / "muster.db", facts["root"], tmp_path)
    with Installation(tmp_path, **ANY_PROCESSOR) as new:
        jobs = {job["job_id"]: job for job in new.request("GET", "/jobs").json()["jobs"]}
        assert jobs["done"]["status"] == "COMPLETED"
        assert (jobs["failed"]["status"], jobs["failed"]["exit_code"]) == ("FAILED", 64)
        assert "boom" in str(new.request("GET", "/jobs/failed/logs").json()["lines"])

        together = new.complete("together")
        assert (together["step"], together["restarts"]) == (320, 0)
        audit = new.request("GET", "/jobs/together/audit").json()
        assert [len(audit["epochs"]), together["checkpoints_saved"] > 0] == [40, True]
        assert [new.last_digest("together")] == facts["digests"]["together"]

        assert new.complete("apart")["restarts"] == 0
        assert new.digests("apart", 2) == facts["digests"]["apart"]

        bearer = {"Authorization": f"Bearer {facts['token']}"}
        assert new.request("GET", "/jobs", headers=bearer).status_code == 200
        assert new.request("POST", "/jobs", headers=bearer, json={}).status_code == 403


def test_checkpoints_from_before_0_1_0_are_resumed_from(tmp_path: Path) -> None:
    with tarfile.open(DATA / "before-0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    with Installation(tmp_path, **ANY_PROCESSOR) as new:
        new.submit(job_id="together", resume_from="running-sync", **SYNCHRONOUS)
        new.submit(job_id="apart", resume_from="running-alone", **INDEPENDENT)
        together = new.complete("together")
        assert together["step"] == 320
        directory = checkpoints_of_job(new.checkpoint_dir, "together")
        assert identity_of(newest_checkpoint(directory, 0, None)) == TOGETHER
        new.complete("apart")
        assert new.digests("apart", 2) == APART
