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

ANY_PROCESSOR = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
"""Without it the steps that are left have other bits on a processor with AVX-512."""

SYNCHRONOUS = "03674a00f53896f9792b63e65154cff7476b74773072087346b0ba59beb96b96"
INDEPENDENT = (
    "3b8a836d535b319e369ea9e0355212465877d3fb84acd70e35bfed886e3fc426",
    "156f8f3345d1d56d1a297c185b430ea7c57d3f0c9caaf60d8d3525523e4846c0",
)
"""Digests of the two interrupted jobs, when build be5da5dc had completed them."""


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
    # The default has changed: jobs keep the directories in their rows.
    with Installation(old_root, CHECKPOINT_DIR="", **ANY_PROCESSOR) as new:
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
