"""An installation of an earlier build is taken over: database, jobs, checkpoints, tokens, secrets.

`data/old-installation.tar.xz` holds the data directory and the checkpoints of build b72b293 after
`muster down`: two finished jobs, and two that were interrupted in the middle.
"""

import sqlite3
import tarfile
from pathlib import Path

import pytest

from muster.checkpoints.comparison import identity_of
from muster.contracts.paths import checkpoints_of_job
from tests.support.installation import Installation, newest_checkpoint

ARCHIVE = Path(__file__).parent / "data" / "old-installation.tar.xz"
OLD_ROOT = "/tmp/muster-old"  # noqa: S108  the paths in its rows

TOKEN = "mst_0029c961cdaa_3078fff26f203c83af8fd0ec68eefea9a80e7cd9c19b34913e92cc7016c31478"  # noqa: S105

SYNCHRONOUS = "9325e2d7cbb4af3957c2f675e9d76acd09bfc0c5ac29016d4bb0463d06f3cd90"
INDEPENDENT = (
    "0c9f491bf114bc98c551f55b4b2693648ce54aae754cd2e3335c6bbd243bf52c",
    "fe9e93836cf8d6aab764ed80a2d50beab700e308c7850114a09feee00ccb53bd",
)
"""Digests of undisturbed runs of the two interrupted jobs, by the same build."""


@pytest.fixture
def old_root(tmp_path: Path) -> Path:
    """The old installation, with the paths in its rows moved to `tmp_path`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    with sqlite3.connect(tmp_path / "data" / "muster.db") as database:
        columns = database.execute(
            "select m.name, p.name from sqlite_master m, pragma_table_info(m.name) p "
            "where m.type = 'table' and upper(p.type) in ('TEXT', 'JSON', 'BLOB', 'VARCHAR')"
        ).fetchall()
        for table, column in columns:
            database.execute(
                f"update {table} set {column} = replace({column}, ?, ?) "  # noqa: S608  names of our schema
                f"where {column} like ?",
                (OLD_ROOT, str(tmp_path), f"%{OLD_ROOT}%"),
            )
    return tmp_path


def test_an_earlier_installation_is_taken_over(old_root: Path) -> None:
    with Installation(old_root, CHECKPOINT_DIR=str(old_root / "work" / "checkpoints")) as new:
        new.checkpoint_dir = old_root / "work" / "checkpoints"
        jobs = {job["job_id"]: job for job in new.request("GET", "/jobs").json()["jobs"]}
        assert jobs["done-sync"]["status"] == "COMPLETED"
        assert (jobs["failed"]["status"], jobs["failed"]["exit_code"]) == ("FAILED", 64)
        assert "boom" in str(new.request("GET", "/jobs/failed/logs").json()["lines"])

        synchronous = new.complete("running-sync")
        assert (synchronous["step"], synchronous["restarts"]) == (320, 0)
        audit = new.request("GET", "/jobs/running-sync/audit").json()
        assert audit["exactly_once"] is True
        assert [len(audit["epochs"]), synchronous["checkpoints_saved"] > 0] == [40, True]
        directory = checkpoints_of_job(new.checkpoint_dir, "running-sync")
        assert identity_of(newest_checkpoint(directory, 0, None)) == SYNCHRONOUS

        assert new.complete("running-alone")["restarts"] == 0
        assert new.digests("running-alone", 2) == list(INDEPENDENT)

        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert new.request("GET", "/jobs", headers=bearer).status_code == 200
        assert new.request("POST", "/jobs", headers=bearer, json={}).status_code == 403
