"""The storage process and its ranks, over a real socket; what is killed here, is killed."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointError, CheckpointFailed, StaleGeneration
from muster.checkpoints.listing import checkpoint_dirs
from muster.checkpoints.manager import open_manager
from muster.checkpoints.manifest import CheckpointName
from muster.contracts.location import S3Location
from muster.contracts.messages.agent import RankCheckpoints
from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.messages.storage import ListGang, Restore
from muster.contracts.settings.names import SENDS_CHECKPOINTS, STORAGE_SOCKET
from muster.contracts.settings.paths import rank_place
from muster.contracts.shards import Position
from muster.datasets.errors import ShardChanged
from muster.datasets.index import Totals
from muster.host.processes import environment_of, identify
from muster.objects.client import S3Client
from muster.runtime import storage_client
from muster.runtime.storage_client import RemoteCheckpoints, RemoteSource
from muster.training.blocks import BusyFlag
from muster.training.groups.state_sync import Committed, Replica
from muster.training.reporter import Reporter
from muster.training.schedule import Schedule
from tests.support.installation import await_value
from tests.support.ranks import Ear, settings_of
from tests.support.s3_server import new_bucket, put_files, shared_store, variables
from tests.support.storage_processes import KEY, StorageStage, session_of

LARGE = {"weights": np.arange(4_000_000, dtype=np.float64), "seen": 7}


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StorageStage]:
    """A stage with one process; its checkpoints are in a directory, or on S3 if a test says so."""
    stage = StorageStage(tmp_path)
    if getattr(request, "param", None) == "s3":
        access = shared_store()
        stage = StorageStage(tmp_path, new_bucket(access), variables(access))
    stage.start()
    yield stage
    stage.close()


everywhere = pytest.mark.parametrize("stage", ["disk", "s3"], indirect=True)


def save(checkpoints: RemoteCheckpoints, step: int, state: dict[str, object]) -> list[int]:
    """Begin a save, and return where its acknowledgements are counted."""
    saved: list[int] = []
    checkpoints.save(step, Position(step=step), state, lambda _bytes: saved.append(step))
    return saved


STATES = [
    {},
    {"text": "ß", "big": 2**70, "none": None, "infinite": float("inf"), "pair": (1, 2.0)},
    {"empty": np.empty((0, 3)), "flags": np.array([True]), "odd": np.float32(3)},
]


@pytest.mark.parametrize("state", STATES, ids=["nothing", "values", "arrays"])
def test_bytes_differ_from_those_saved_locally(
    stage: StorageStage, tmp_path: Path, state: dict[str, object]
) -> None:
    rank, local = stage.rank(), open_manager(session_of(tmp_path / "local"), print)
    rank.claim()
    assert rank.restore() is None
    saved = save(rank, 4, state)
    rank.flush()
    manifest = local.save(4, Position(step=4), state)
    found, wanted = rank.restore(), local.restore()
    assert saved == [4]
    assert found is not None
    assert wanted is not None
    assert found.manifest.files == manifest.files
    assert found.manifest.values == manifest.values
    assert repr(found.state) == repr(wanted.state)
    assert all(array.flags.writeable for array in found.state.values() if hasattr(array, "flags"))


@everywhere
def test_killed_process_loses_or_repeats_a_save(stage: StorageStage) -> None:
    rank = stage.rank()
    rank.claim()
    acknowledged = []
    for step in range(1, 5):
        acknowledged.append(save(rank, step, LARGE | {"step": step}))
        time.sleep(step * 0.03)  # somewhere in the save
        stage.kill()
        rank.flush()
    assert acknowledged == [[step] for step in range(1, 5)]
    found = rank.restore()
    assert found is not None
    assert found.step == found.state["step"] == 4
    assert found.state["weights"].tobytes() == LARGE["weights"].tobytes()
    assert not [said for said in stage.warnings if "could not save" in said]
    rank.close()
    if isinstance(stage.location, S3Location):
        client = S3Client(shared_store())
        await_value(lambda: not [*client.uploads(stage.location)], stage.log.read_text)


@everywhere
def test_a_witness_follows_its_save(stage: StorageStage) -> None:
    rank = stage.rank()
    rank.claim()
    long = msgspec.json.encode({"seen": "x" * 100_000})  # longer than a packet
    for step, witness in enumerate((b'{"seen":1}', long), start=1):
        saved = save(rank, step, LARGE | {"step": step})
        rank.put_witness(witness)
        stage.kill()
        assert rank.witness() == witness
        assert saved == [step]
    save(rank, 3, LARGE)
    rank.flush()
    assert rank.witness() == b""
    rank.put_witness(b"{}")
    rank.close()
    assert stage.rank().witness() == b"{}"


@everywhere
def test_killed_process_spoils_a_restore(stage: StorageStage) -> None:
    rank = stage.rank()
    save(rank, 3, LARGE)
    rank.flush()
    for _ in range(4):
        os.kill(stage.pid(), signal.SIGSTOP)
        rank._connection.send(Restore())  # noqa: SLF001
        stage.kill()
        found = rank.restore()
        assert found is not None
        assert found.state["weights"].tobytes() == LARGE["weights"].tobytes()


RANK = """
import os, signal, sys
import numpy as np
from pathlib import Path
from muster.contracts.location import S3Location
from muster.contracts.shards import Position
from tests.support.storage_processes import StorageStage
rank = StorageStage(Path(sys.argv[1])).rank()
rank.claim()
rank.save(5, Position(step=5), {"weights": np.ones(4_000_000)}, lambda _bytes: None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_save_is_lost_with_its_rank(stage: StorageStage, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    successor = stage.rank(generation=2)
    successor.claim()  # after the save of its predecessor
    found = successor.restore()
    assert found is not None
    assert found.step == 5


@everywhere
def test_agent_lists_what_ranks_have_saved(stage: StorageStage) -> None:
    job = stage.location
    places = [rank_place(job, rank) for rank in range(3)]
    for steps, place in zip([(3, 6), (), (3,)], places, strict=True):
        rank = stage.rank(place=place)
        for step in steps:
            save(rank, step, {"step": step})
        rank.flush()
    listed = listing(stage, uid="uid", is_inherited=False)
    assert [[name.step for name in held] for held in listed] == [[6, 3], [], [3]]
    assert listing(stage, uid="another", is_inherited=False) == [[], [], []]
    assert listing(stage, uid="another", is_inherited=True) == listed
    assert listing(stage, uid="uid", is_inherited=True) == []


def listing(stage: StorageStage, uid: str, *, is_inherited: bool) -> list[list[CheckpointName]]:
    request = ListGang(
        location=str(stage.location), ranks=3, job_uid=uid, is_inherited=is_inherited
    )
    content = stage.connection().ask(request)[1]
    listed = msgspec.json.decode(content, type=list[RankCheckpoints])
    return [[name for text in it.intact if (name := CheckpointName.parse(text))] for it in listed]


@everywhere
def test_fenced_rank_goes_on(stage: StorageStage) -> None:
    old, new = stage.rank(1), stage.rank(2)
    old.claim()
    new.claim()
    saved = save(old, 1, {})
    with pytest.raises(StaleGeneration, match="generation 2"):
        old.flush()
    assert not saved


def test_failed_save_ends_training_or_is_forgotten(stage: StorageStage) -> None:
    rank = stage.rank()
    rank.claim()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(stage.pid(), resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
    saved = save(rank, 1, LARGE)
    small = save(rank, 2, {})
    rank.flush()
    assert (saved, small) == ([], [2])
    assert len(stage.warnings) == 1
    assert "the next save tries again" in stage.warnings[0]
    last = save(rank, 3, LARGE)
    with pytest.raises(CheckpointFailed):
        rank.flush()
    last = save(rank, 4, LARGE)
    await_value(lambda: len(stage.warnings) >= 3, lambda: str(stage.warnings))
    resource.prlimit(stage.pid(), resource.RLIMIT_FSIZE, unlimited)
    rank.flush()  # tries it once more
    assert last == [4]


def test_rank_that_waits_for_the_store_says_so(
    stage: StorageStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_client, "NOTICE_SECONDS", 0.1)
    rank = stage.rank()
    rank.claim()
    os.kill(stage.pid(), signal.SIGSTOP)
    saved = save(rank, 1, {})
    waiting = threading.Thread(target=rank.flush)
    waiting.start()
    await_value(lambda: stage.warnings, str)
    assert stage.warnings[0].startswith("training waits")
    os.kill(stage.pid(), signal.SIGCONT)
    waiting.join()
    assert saved == [1]


def test_lasting_error_is_raised_as_something_else(tmp_path: Path) -> None:
    stage = StorageStage(tmp_path)
    stage.start()
    (tmp_path / "checkpoints").write_text("no directory")
    with pytest.raises(CheckpointError) as remote:
        stage.rank().claim()
    with pytest.raises(CheckpointError) as local:
        open_manager(session_of(tmp_path / "checkpoints"), print).claim()
    assert (remote.type, str(remote.value)) == (local.type, str(local.value))
    stage.close()


def test_standby_serves_too_early_or_never(stage: StorageStage) -> None:
    first = stage.pid()
    stage.start()
    rank = stage.rank()
    rank.claim()
    assert stage.pid() == first
    saved = save(rank, 1, LARGE)
    os.kill(first, signal.SIGKILL)
    rank.flush()
    assert saved == [1]
    assert stage.pid() != first


@everywhere
def test_sigterm_drops_what_was_handed_over(stage: StorageStage) -> None:
    rank = stage.rank()
    rank.claim()
    saved = save(rank, 1, LARGE)
    os.kill(stage.pid(), signal.SIGTERM)
    await_value(lambda: saved == [1], stage.log.read_text)


STARTER = """
import signal, sys
from pathlib import Path
from tests.support.storage_processes import StorageStage
StorageStage(Path(sys.argv[1])).start()
signal.pause()
"""


def test_process_stays_without_starter_and_ranks(tmp_path: Path) -> None:
    stage = StorageStage(tmp_path)
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)]) as starter:
        rank = stage.rank()
        rank.claim()
        pid = stage.pid()
        starter.kill()
    saved = save(rank, 1, {})
    rank.flush()
    assert saved == [1]
    stage.close()
    await_value(lambda: identify(pid) is None, lambda: f"{pid} stays")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoints", "storage.log", "storage.sock.lock"}


def test_key_is_in_the_environment_or_log(stage: StorageStage) -> None:
    pid = stage.pid()
    assert KEY not in environment_of(pid).values()
    assert KEY not in Path(f"/proc/{pid}/cmdline").read_text()
    place = stage.rank(job_id=KEY)
    Path(str(stage.location)).write_text("no directory")
    with pytest.raises(CheckpointError):
        place.claim()
    assert KEY not in stage.log.read_text()


@pytest.mark.parametrize("stage", ["s3"], indirect=True)
def test_new_process_reads_other_shards_under_old_numbers(
    stage: StorageStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cache"))
    stage.kill()  # the next one has the cache of this test
    client, place = S3Client(shared_store()), stage.location.parent / "shards"
    put_files(client, place, {"shard_1.txt": b"1\n", "shard_3.txt": b"3\n"})
    rank = RemoteSource(place, stage.connection())
    assert rank.path(1).read_bytes() == b"3\n"
    first = stage.kill()
    await_value(lambda: stage.pid() != first, stage.log.read_text)
    assert rank.path(1).read_bytes() == b"3\n"
    put_files(client, place, {"shard_2.txt": b"2\n"})
    assert rank.totals(range(2))[1].lines == 1
    stage.kill()
    for ask in (lambda: rank.path(1), lambda: rank.totals(range(2))):
        with pytest.raises(ShardChanged, match="other shards than"):
            ask()
    assert len(RemoteSource(place, stage.connection()).shards) == 3


def test_an_improvement_waits_for_the_one_before_it(stage: StorageStage, tmp_path: Path) -> None:
    """The one before is the better one, and is not durable yet when the next one is judged."""
    member = GroupMember(worker_id=0, rank=0, host="", port=0)
    ear, group = Ear(), WorkerGroup(round=1, token="", members=(member,), paused=False)
    names = {
        "JOB_ID": "job",
        "MUSTER_AGENT_FD": ear.descriptor,
        STORAGE_SOCKET: stage.socket,
        SENDS_CHECKPOINTS: 1,
        "MUSTER_KEEP_BEST": '{"metric": "m"}',
    }
    reporter = Reporter(settings_of(tmp_path, **names), ear.voice, BusyFlag())
    schedule = Schedule(
        totals=Totals(lines=16, hash_sum=0),
        batch_size=16,
        virtual_shards=8,
        epochs=9,
        seed=0,
        checkpoint_every=99,
    )
    reporter.set_schedule({}, schedule)
    replica = Replica({})
    reporter.on_group_joined(group, replica)
    process = stage.pid()
    os.kill(process, signal.SIGSTOP)
    saving = None
    for step, value in ((5, 0.0), (6, 0.5)):
        replica.commit({"weights": np.zeros(1)}, Committed(position=Position(step=step)))
        reporter.report(step, {"m": value})
        assert reporter.is_best(replica)
        saving = threading.Thread(target=reporter.save_checkpoint, args=(group, replica))
        saving.start()
        if step == 5:
            saving.join()  # it is handed over
    os.kill(process, signal.SIGCONT)
    saving.join()
    reporter.flush()
    (directory,) = checkpoint_dirs(tmp_path / "checkpoints" / "job")
    assert directory.newest().step == 6
    assert directory.name_of("best").step == 5
    ear.close()
