"""`muster backup` while jobs train; a new data directory goes on from it with the same bits."""

import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.installation import Installation, Undisturbed, restarts
from tests.support.marks import long
from tests.support.paced import PACE_FILE
from tests.support.pools import PROGRAM
from tests.support.undisturbed import bits

FIELDS = {
    "independent": {"mode": "independent", "epochs": 20, "sleep_sec": 0.1},
    "synchronous": PROGRAM,
}
DEATHS = 2
"""Of rank 0 after the backup: what it saves then is of later generations than the copy knows."""


def back_up(environment: dict[str, str], copy: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", "backup", str(copy), "-o", "json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("mode", [long("independent"), "synchronous"])
def test_a_private_backup_is_restored_with_the_same_bits(
    tmp_path: Path, dataset_dir: Path, undisturbed: Undisturbed, mode: str
) -> None:
    with Installation(tmp_path, DATASET_DIR=str(dataset_dir)) as original:
        pace = tmp_path / "pace"
        pace.write_text("0.02")
        fields = {**FIELDS[mode], "world_size": 2, "checkpoint_every": 2}
        fields |= {"env": {PACE_FILE: str(pace)}}
        job_id = original.submit(**fields)
        original.wait_until(job_id, lambda seen: seen["checkpoints_saved"] > 2)
        pace.write_text("0.2")  # it is not over before rank 0 has died often enough
        copy = tmp_path / "copy.db"
        done = back_up(original.environment, copy)
        assert done.returncode == 0, done.stderr
        listed = msgspec.json.decode(done.stdout)
        assert listed["checkpoints"] == [str(original.checkpoint_dir)]
        content = copy.read_bytes()
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        for death in range(DEATHS):
            original.kill(job_id, 0)
            original.wait_until(job_id, restarts(death + 1))
        original.coordinator.end(signal.SIGINT)  # as `muster down`
        again = back_up(original.environment, copy)
        assert (again.returncode, again.stdout, copy.read_bytes()) == (1, "", content)
        assert "File exists" in again.stderr
        original.forget_jobs()
    pace.unlink()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "data").mkdir(parents=True)
    copy.rename(elsewhere / "data" / "muster.db")
    if mode == "independent":  # the other copy is a new node
        shutil.copy2(*listed["node"], elsewhere / "data")
    with Installation(elsewhere, CHECKPOINT_DIR=str(original.checkpoint_dir)) as restored:
        restored.checkpoint_dir = original.checkpoint_dir
        restored.complete(job_id)
        assert bits(restored, job_id) == undisturbed(**fields)


def test_there_is_nothing_to_back_up_before_the_first_start(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    missing = back_up({"MUSTER_DATA_DIR": str(tmp_path / "data")}, copy)
    assert (missing.returncode, copy.exists()) == (1, False)


def test_another_kind_of_database_is_left_to_its_own_tool(tmp_path: Path) -> None:
    environment = {"MUSTER_DATABASE_URL": "postgresql://u:secret@127.0.0.1:1/muster"}
    refused = back_up(environment, tmp_path / "copy.db")
    assert refused.returncode == 1
    assert "use pg_dump" in refused.stderr
    assert "secret" not in refused.stderr
