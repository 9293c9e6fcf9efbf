"""Jobs on S3: the storage process and ranks are killed, and no bit differs from a local run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.checkpoints import digests
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.location import S3Location
from muster.contracts.paths import checkpoints_of_job
from muster.host.processes import environment_of
from tests.support.installation import Installation, pids
from tests.support.s3_server import bare_client, new_bucket, shared_store
from tests.support.storage_processes import listening_process
from tests.support.undisturbed import UndisturbedRuns

SECRET = "secret-key-of-the-store"  # noqa: S105  for a test; moto accepts any


@pytest.fixture
def bucket() -> S3Location:
    return new_bucket(shared_store())


@pytest.fixture
def on_s3(
    tmp_path: Path, dataset_dir: Path, bucket: S3Location, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    access = shared_store()
    keys = {
        "S3_ENDPOINT": str(access.endpoint),
        "S3_ACCESS_KEY": str(access.access_key),
        "S3_SECRET_KEY": os.environ.get("S3_SECRET_KEY", SECRET),
    }
    for name, value in keys.items():
        monkeypatch.setenv(name, value)  # for reading what jobs have saved
    for shard in dataset_dir.glob("*.*"):
        bare_client(access).upload_file(
            shard, bucket.bucket, f"{bucket.prefix}/shards/{shard.name}"
        )
    places = {"CHECKPOINT_DIR": str(bucket), "DATASET_DIR": str(bucket / "shards")}
    cache = {"MUSTER_CACHE_DIR": str(tmp_path / "cache")}
    with Installation(tmp_path, **keys, **places, **cache) as installation:
        yield installation


KINDS = [
    {"world_size": 2, "epochs": 6, "checkpoint_every": 4, "sleep_sec": 0.05},
    {
        "world_size": 2,
        "mode": "synchronous",
        "epochs": 4,
        "batch_size": 32,
        "virtual_shards": 8,
        "checkpoint_every": 3,
        "sleep_sec": 0.03,
    },
]


@pytest.mark.parametrize("fields", KINDS, ids=["independent", "synchronous"])
def test_killed_processes_change_the_bits(
    on_s3: Installation, bucket: S3Location, undisturbed: UndisturbedRuns, fields: dict[str, object]
) -> None:
    wanted = undisturbed(**fields)
    job_id = on_s3.submit(**fields)
    seen = on_s3.wait_until(job_id, lambda seen: seen["workers"][0]["checkpoints_saved"])
    storage = on_s3.files.job(job_id).storage_socket
    for pid in pids(seen):
        held = {
            *environment_of(pid).values(),
            *Path(f"/proc/{pid}/cmdline").read_text().split("\0"),
        }
        assert SECRET not in held
    os.kill(listening_process(storage), signal.SIGKILL)
    on_s3.kill(job_id, 0)
    os.kill(listening_process(storage), signal.SIGKILL)
    on_s3.complete(job_id)
    found = [it for _, _, it in digests(checkpoint_dirs(checkpoints_of_job(bucket, job_id)))]
    assert found == wanted
    assert not storage.exists()
    assert on_s3.running_processes() == []
    logs = [path for path in on_s3.files.root.rglob("*.log") if SECRET in path.read_text()]
    assert logs == []
