"""Jobs on S3: the storage process and ranks are killed, and no bit differs from a local run."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.data.checkpoints import find_checkpoint
from muster.checkpoints.comparison import digests, identity_of
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.location import S3Location
from muster.contracts.settings.paths import checkpoints_of_job
from muster.host.processes import all_pids, environment_of
from muster.objects.client import S3Client
from tests.support.faulty_store import FaultyStore, faulty
from tests.support.installation import Installation, await_value, pids
from tests.support.marks import long
from tests.support.s3_server import (
    bare_client,
    new_bucket,
    put_files,
    shared_store,
    variables,
)
from tests.support.storage_processes import StorageStage, listening_process
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
        **variables(access),
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


@pytest.mark.parametrize("fields", [long(KINDS[0]), KINDS[1]], ids=["independent", "synchronous"])
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


@pytest.fixture(scope="module")
def proxied_installation(
    tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path
) -> Iterator[tuple[Installation, FaultyStore]]:
    root = tmp_path_factory.mktemp("proxied")
    with faulty(shared_store()) as store:
        environment = {**variables(store.access), "MUSTER_CACHE_DIR": str(root / "cache")}
        with Installation(root, DATASET_DIR=str(dataset_dir), **environment) as installation:
            yield installation, store


@pytest.fixture
def proxied(
    proxied_installation: tuple[Installation, FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Installation, FaultyStore]]:
    installation, store = proxied_installation
    for name, value in variables(store.access).items():
        monkeypatch.setenv(name, value)  # for saving here what is deleted there
    yield proxied_installation
    store.fault, store.rewrite = lambda _: None, lambda *_: None
    installation.end_jobs()


FAULTS = {fault: lambda _, fault=fault: fault for fault in ("403", "drop before", "cut 40")}
REFUSALS = [
    ("dataset_dir", "s3:/b", "", 422, "is not a location"),
    ("checkpoint_dir", "s3://", "", 422, "names no bucket"),
    ("checkpoint_dir", "gs://x", "", 422, "is not a location"),
    ("checkpoint_dir", "/data/s3:/b", "", 422, "is not a location"),
    ("dataset_dir", "s3://missing-bucket/x", "", 422, "has no bucket 'missing-bucket'"),
    ("checkpoint_dir", "s3://missing-bucket/x", "", 422, "has no bucket 'missing-bucket'"),
    ("dataset_dir", "", "", 422, "make one with muster dataset"),
    ("dataset_dir", "", "403", 422, "refuses access"),
    ("checkpoint_dir", "", "403", 422, "refuses access"),
    ("checkpoint_dir", "", "no conditions", 422, "it overwrites an object"),
    ("checkpoint_dir", "", "drop before", 503, "does not answer"),
    ("dataset_dir", "", "cut 40", 503, "cut its answer"),
    ("checkpoint_dir", "", "cut 40", 503, "cut its answer"),
]


def test_a_location_that_cannot_be_used_is_refused(
    proxied: tuple[Installation, FaultyStore],
) -> None:
    installation, store = proxied
    for field, text, fault, status, sentence in REFUSALS:
        store.fault = FAULTS.get(fault, lambda _: None)
        store.rewrite = drop_conditions if fault == "no conditions" else lambda *_: None
        place = text or str(new_bucket(shared_store()))
        began = time.monotonic()
        answer = installation.request("POST", "/jobs", json={field: place})
        assert time.monotonic() - began < 10
        assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), (
            answer.text
        )
        assert answer.json()["detail"].startswith(f"{field}: ")
    assert installation.see_all() == []


def drop_conditions(_: str, headers: dict[str, str]) -> None:
    for name in [name for name in headers if name.lower().startswith("if-")]:
        del headers[name]


def test_a_delete_removes_the_objects_of_its_job_only(
    proxied: tuple[Installation, FaultyStore],
) -> None:
    installation, store = proxied
    bucket = new_bucket(shared_store())
    fields = {"world_size": 1, "checkpoint_dir": str(bucket), "mode": "independent"}
    doomed, kept = (installation.submit(**fields) for _ in range(2))
    for job_id in (doomed, kept):
        installation.complete(job_id)
    client = S3Client(shared_store())
    put_files(client, bucket / doomed, {"notes.txt": b"mine", "step_0000000001.g0001/x": b"mine"})
    before = {each.name for each in client.list(bucket)}
    again = {**fields, "job_id": "again", "resume_from": doomed}
    assert installation.request("POST", "/jobs?dry_run=true", json=again).status_code == 200
    missing = {**fields, "resume_from": "nobody"}
    assert "holds no checkpoints" in installation.request("POST", "/jobs", json=missing).text

    store.fault = lambda _: "503"
    path = f"/jobs/{doomed}?delete_checkpoints=true"
    assert installation.request("DELETE", path).status_code == 409
    store.fault = lambda _: None
    would = installation.request("POST", "/jobs/purge?dry_run=true&delete_checkpoints=true").json()
    assert would["freed_bytes"] > sum(each.size_bytes for each in client.list(bucket / doomed))
    assert installation.request("DELETE", f"/jobs/{kept}").json()["checkpoints_deleted"] is False
    refused = installation.request("POST", "/jobs", json={**fields, "job_id": kept})
    assert refused.json()["type"] == "/problems/checkpoints-left-over"
    assert installation.request("DELETE", path).json()["checkpoints_deleted"] is True
    installation.forget(doomed)
    installation.forget(kept)
    stays = {f"{doomed}/notes.txt", f"{doomed}/step_0000000001.g0001/x"}
    left = {each.name for each in client.list(bucket)}
    assert left == stays | {name for name in before if name.startswith(kept)}


def test_rank_by_hand_needs_services_or_leaves_a_process(
    store: dict[str, str], terminal: Terminal
) -> None:
    rank = {"JOB_ID": "alone", "RANK": "0", "WORLD_SIZE": "4", **store}
    code, output = terminal.run("-P", "-m", "worker", **rank)
    assert (code, "step 8/8  is done" in output) == (0, True), output
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
    [("", 0, ""), ("lost", 1, "has no bucket"), ("fenced", 75, "has been replaced")],
)
def test_end_of_a_script_hides_that_its_save_failed(
    store: dict[str, str], terminal: Terminal, tmp_path: Path, word: str, code: int, said: str
) -> None:
    (terminal.directory / "train.py").write_text(SAVING)
    stage = StorageStage(tmp_path, keys=store)
    stage.start()
    ended, output = terminal.run("train.py", word, **store, MUSTER_STORAGE_SOCKET=str(stage.socket))
    stage.close()
    assert "not durable yet" in output
    assert (ended, said in output) == (code, True), output


IMPROVES = """
import os
import signal
from pathlib import Path

import torch
import muster.torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
run = muster.torch.join(model, optimizer, data=data, batch_size=32)


def end_saver(step):
    if run.step == step and run.is_main and not (killed := Path(f"killed-{step}")).exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@run.after_step
def evaluate():
    run.report(val_loss={5: 3, 7: 2}.get(run.step, 20 - run.step))
    end_saver(5)  # before it saves this improvement


for (x,) in run.shards():
    end_saver(7)  # after it has handed over that one
    run.backward(model(x).square().mean())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # six starts with torch
@pytest.mark.parametrize("where", ["store", long("directory")])
def test_the_best_checkpoint_survives_its_saver(
    on_s3: Installation, bucket: S3Location, tmp_path: Path, where: str
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(IMPROVES)
    above = tmp_path / "saved" if where == "directory" else bucket / "best"
    fields = {
        "command": [sys.executable, "-W", "ignore", "train.py"],
        "working_dir": str(tmp_path),
        "checkpoint_dir": str(above),
        "mode": "synchronous",
        "virtual_shards": 8,
        "world_size": 2,
        "min_workers": 2,  # the one that is left has reported the improvement as well
        "spare_ranks": 0,
        "epochs": 6,
        "checkpoint_every": 1000,
    }
    best = {"keep_best": {"metric": "val_loss"}, "keep_last": 1}
    job_id = on_s3.submit(**fields, **best)
    await_value((tmp_path / "killed-5").exists, lambda: on_s3.describe(job_id))
    on_s3.restart_coordinator()
    await_value((tmp_path / "killed-7").exists, lambda: on_s3.describe(job_id))
    on_s3.complete(job_id)
    place = checkpoints_of_job(above, job_id)
    (directory,) = checkpoint_dirs(place)
    assert {it.step for it in directory.reader.store.names()} == {7, 12}
    assert find_checkpoint(f"{place}/:best", None).step == 7
    resumed = {"resume_from": {"job": job_id, "step": "best"}, "world_size": 1, "min_workers": 1}
    later = on_s3.submit(**fields | resumed)
    assert on_s3.job(later)["spec"]["resume_from"] == f"{job_id}:7"
    on_s3.complete(later)
    assert "step 7/12  goes on from the checkpoint" in on_s3.log(later)
    newest = (checkpoint_dirs(checkpoints_of_job(above, it))[0].newest() for it in (job_id, later))
    assert len({identity_of(it) for it in newest}) == 1
    for step, words in ((6, "it has steps 7, 12"), ("best", "has no keep_best")):
        refused = {**fields, "resume_from": {"job": job_id if step == 6 else later, "step": step}}
        answer = on_s3.request("POST", "/jobs?dry_run=true", json=refused)
        assert (answer.status_code, words in answer.text) == (422, True), answer.text
