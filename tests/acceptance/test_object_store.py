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
from muster.host.processes import all_pids, environment_of
from tests.support.installation import Installation, pids
from tests.support.s3_server import bare_client, new_bucket, shared_store
from tests.support.storage_processes import listening_process
from tests.support.terminals import Terminal
from tests.support.undisturbed import UndisturbedRuns

SECRET = "secret-key-of-the-store"  # noqa: S105  for a test; moto accepts any


@pytest.fixture
def bucket() -> S3Location:
    return new_bucket(shared_store())


@pytest.fixture
def store(
    tmp_path: Path, dataset_dir: Path, bucket: S3Location, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Return the settings of a store that has the data set; this process has them, too."""
    access = shared_store()
    for shard in dataset_dir.glob("*.*"):
        bare_client(access).upload_file(shard, bucket.bucket, f"shards/{shard.name}")
    settings = {
        "USE_S3": "true",
        "S3_BUCKET": bucket.bucket,
        "S3_ENDPOINT": str(access.endpoint),
        "S3_ACCESS_KEY": str(access.access_key),
        "S3_SECRET_KEY": os.environ.get("S3_SECRET_KEY", SECRET),
        "MUSTER_CACHE_DIR": str(tmp_path / "cache"),
        "CHECKPOINT_DIR": "",
        "DATASET_DIR": "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture
def on_s3(tmp_path: Path, store: dict[str, str]) -> Iterator[Installation]:
    with Installation(tmp_path, **store) as installation:
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
    place = checkpoints_of_job(S3Location(bucket.bucket, "checkpoints"), job_id)
    found = [it for _, _, it in digests(checkpoint_dirs(place))]
    assert found == wanted
    assert not storage.exists()
    assert on_s3.running_processes() == []
    logs = [path for path in on_s3.files.root.rglob("*.log") if SECRET in path.read_text()]
    assert logs == []


def test_rank_by_hand_needs_services_or_leaves_a_process(
    store: dict[str, str], terminal: Terminal
) -> None:
    rank = {"JOB_ID": "alone", "RANK": "0", "WORLD_SIZE": "4", **store}
    code, output = terminal.run("-P", "-m", "worker", **rank)
    assert (code, "rank 0  step 8/8  is done" in output) == (0, True), output
    code, output = terminal.run("-P", "-m", "worker", **rank)
    assert (code, "goes on from its checkpoint of step 8" in output) == (0, True), output
    bucket = store["S3_BUCKET"]
    left = [pid for pid in all_pids() if environment_of(pid).get("S3_BUCKET") == bucket]
    assert left == []


SAVING = """
import boto3, os, subprocess, sys, muster
run = muster.join()
run.restore()
if "second" in sys.argv:
    sys.exit()
if "lost" in sys.argv:
    store = {"endpoint_url": os.environ["S3_ENDPOINT"], "region_name": "us-east-1"}
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    bucket = boto3.resource("s3", **store, **keys).Bucket(os.environ["S3_BUCKET"])
    bucket.objects.delete()
    bucket.delete()
if "fenced" in sys.argv:
    subprocess.run([sys.executable, __file__, "second"], check=True)
run.step()
run.checkpoint({"step": 1})
print("not durable yet")
"""


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [("", 0, ""), ("lost", 1, "has no bucket"), ("fenced", 75, "it has been replaced")],
)
def test_end_of_a_script_hides_that_its_save_failed(
    store: dict[str, str], terminal: Terminal, word: str, code: int, said: str
) -> None:
    (terminal.directory / "train.py").write_text(SAVING)
    ended, output = terminal.run("train.py", word, **store)
    assert "not durable yet" in output
    assert (ended, said in output) == (code, True), output
