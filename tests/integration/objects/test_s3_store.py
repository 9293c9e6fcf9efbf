"""What is special about checkpoints in an object store; tests/promises has the rest."""

import threading

import numpy as np
import pytest

from muster.checkpoints.deletion import entries, remove
from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointNotWritable,
    StaleGeneration,
)
from muster.checkpoints.format import State
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    WITNESS,
    CheckpointName,
    Owner,
    decode_manifest,
)
from muster.checkpoints.s3 import S3Store
from muster.contracts.location import S3Location
from muster.objects.client import PART_BYTES, S3Client
from tests.support.checkpoint_ranks import commit
from tests.support.faulty_store import FaultyStore
from tests.support.s3_server import bare_client, shared_store, variables

LONG = {"weights": np.arange(PART_BYTES // 8 + 1000)}


def claimed(s3: S3Client, place: S3Location, generation: int, uid: str = "uid") -> S3Store:
    store = S3Store(s3, place)
    store.claim(generation, uid)
    return store


def left(s3: S3Client, place: S3Location) -> list[str]:
    assert [*s3.uploads(place)] == []
    return [stored.name for stored in s3.list(place) if stored.name != LATEST]


def test_save_takes_three_requests_and_restore_lists_nothing(
    s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    store = claimed(s3, place, 0)
    faulty_store.operations.clear()
    name = commit(store, 0, 1)
    assert faulty_store.operations == [f"PUT {STATE}", f"PUT {MANIFEST}", f"PUT {LATEST}"]
    faulty_store.operations.clear()
    reader = S3Store(s3, place)
    assert next(reader.by_trust()) == name
    content = reader.read(name, MANIFEST, MANIFEST_LIMIT_BYTES)
    reader.read(name, STATE, decode_manifest(content, "").files[STATE].size_bytes)
    assert faulty_store.operations == [f"GET {LATEST}", f"GET {MANIFEST}", f"GET {STATE}"]


@pytest.mark.parametrize("fault", ["drop before", "drop after", "late", "409", "500", "503"])
@pytest.mark.parametrize("content", [None, LONG], ids=["small", "long"])
def test_save_survives_a_fault_of_each_request(
    fault: str, content: State | None, s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    store, seen = claimed(s3, place, 0), set[str]()

    def once(operation: str) -> str | None:
        is_new = operation not in seen
        seen.add(operation)
        return fault if is_new else None

    faulty_store.fault = once
    names = [commit(store, 0, step, content) for step in (1, 2)]
    assert names == [CheckpointName(0, 1), CheckpointName(0, 2)]
    assert S3Store(s3, place).latest() == names[-1]


def test_save_without_a_store_fails_and_the_next_one_succeeds(
    faulty_store: FaultyStore, place: S3Location
) -> None:
    client = S3Client(faulty_store.access, retry_seconds=0)
    store = claimed(client, place, 0)
    first = commit(store, 0, 1)
    for broken in f"PUT {STATE}", f"PUT {MANIFEST}", f"PUT {LATEST}":
        for fault in "503", "412":
            faulty_store.fault = {broken: fault}.get
            with pytest.raises(CheckpointFailed):
                commit(store, 0, 2)
            faulty_store.fault = {}.get
            assert store.latest() == first
            assert store.claim(0, "uid") == 0
    assert commit(store, 0, 2) == store.latest()
    faulty_store.fault = {f"PUT {STATE}": "403"}.get
    with pytest.raises(CheckpointNotWritable):
        commit(store, 0, 3)


def test_claim_removes_what_dead_writers_left(faulty_store: FaultyStore, place: S3Location) -> None:
    client = S3Client(faulty_store.access, retry_seconds=0)
    older = claimed(client, place, 1)
    kept = [commit(older, 1, 1)]
    for step, broken in (2, f"PUT {MANIFEST}"), (3, "COMPLETE"), (4, f"PUT {LATEST}"):
        faulty_store.fault = {broken: "503", "ABORT": "503"}.get
        with pytest.raises(CheckpointFailed):
            commit(older, 1, step, LONG if step == 3 else None)
    faulty_store.fault = {}.get
    kept.append(CheckpointName(1, 4))  # whole, and a restart may fall back to it
    kept.append(CheckpointName(5, 9))  # of a newer generation
    client.put_if_absent(place / str(kept[-1]) / STATE, [memoryview(b"begun")])
    assert len([*client.uploads(place)]) == 1
    claimed(client, place, 3)
    assert {name.partition("/")[0] for name in left(client, place)} == {*map(str, kept)}
    assert S3Store(client, place).latest() == kept[0]


def test_close_leaves_uploads_of_dead_writers(faulty_store: FaultyStore, place: S3Location) -> None:
    client = S3Client(faulty_store.access, retry_seconds=0)
    killed, replaced = claimed(client, place, 1), place / str(CheckpointName(2, 1)) / STATE
    faulty_store.fault = {"COMPLETE": "503", "ABORT": "503"}.get
    with pytest.raises(CheckpointFailed):
        commit(killed, 1, 1, LONG)  # as if its process had ended here
    faulty_store.fault = {}.get
    successor = claimed(client, place, 1)
    assert [*client.uploads(place)] == [], "nothing is left of a first start"
    commit(successor, 1, 1, LONG)
    own = place / str(CheckpointName(1, 2)) / STATE
    for begun in own, replaced:
        bare_client(shared_store()).create_multipart_upload(Bucket=place.bucket, Key=begun.prefix)
    killed.close()
    assert len([*client.uploads(place)]) == 2  # they could be the successor's
    successor.close()
    assert [name for name, _ in client.uploads(place)] == [f"{CheckpointName(2, 1)}/{STATE}"]


def test_manifest_that_is_not_listed_protects_its_state(s3: S3Client, place: S3Location) -> None:
    name = commit(claimed(s3, place, 1), 1, 1)
    store = S3Store(s3, place)
    hidden = s3.list
    s3.list = lambda *arguments: (  # as Swift did after a crash
        stored for stored in hidden(*arguments) if not stored.name.endswith(MANIFEST)
    )
    store.claim(2, "uid")
    assert store.read(name, STATE, 10_000)


def test_one_of_many_claims_wins(s3: S3Client, place: S3Location) -> None:
    stores = [S3Store(s3, place) for _ in range(6)]
    claimed(s3, place, 0)
    threads = [threading.Thread(target=store.claim, args=(1, "uid")) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    saved = []
    for store in stores:
        try:
            saved.append(commit(store, 1, 1))
        except StaleGeneration:
            continue
    assert saved == [S3Store(s3, place).latest()]


def test_a_claim_that_always_loses_ends(
    s3: S3Client, faulty_store: FaultyStore, place: S3Location
) -> None:
    store = S3Store(s3, place)
    faulty_store.fault = {f"PUT {LATEST}": "412"}.get
    with pytest.raises(CheckpointFailed, match="end the processes that save there"):
        store.claim(0, "uid")


@pytest.mark.parametrize("content", [None, b"", b"step_1\n", b"\xff" * 300, b"x" * 70_000])
def test_unreadable_latest_is_replaced_by_the_newest(
    content: bytes | None, s3: S3Client, place: S3Location
) -> None:
    older = claimed(s3, place, 1)
    names = [commit(older, 1, step) for step in (1, 2)]
    s3.delete([place / LATEST])
    if content is not None:
        s3.put_if_absent(place / LATEST, [memoryview(content)])
    store = S3Store(s3, place)
    if content and len(content) > 65_536:
        with pytest.raises(CheckpointFailed, match="too many"):
            store.claim(2, "uid")
        return
    with pytest.raises(CheckpointFailed):
        commit(older, 1, 3)
    assert (store.latest(), [*store.by_trust()][-2:]) == (None, names[::-1])
    assert store.claim(None, None) == 2
    assert commit(store, 2, 3, uid="uid") == store.latest()


def test_only_what_is_the_owners_is_deleted(
    s3: S3Client, place: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = bare_client(shared_store())
    for name, value in variables(shared_store()).items():
        monkeypatch.setenv(name, value)
    ours = Owner(job_id="job", job_uid="uid", rank=0, world_size=2, generation=None)
    for where, uid in ("", "uid"), ("worker_0", "uid"), ("worker_1", "uid"), ("worker_1", "other"):
        at = place / where if where else place
        commit(claimed(s3, at, 0, uid), 0, 1, uid=uid)
    damaged = CheckpointName(0, 7)
    for name in (
        f"{damaged}/{MANIFEST}",
        f"{damaged}/{WITNESS}",
        "notes.txt",
        f"worker_1/{damaged}/{STATE}",
    ):
        s3.put_if_absent(place / name, [memoryview(b"{}")])
    for name in f"worker_0/{damaged}/{STATE}", f"worker_1/{damaged}/{STATE}", "notes.txt":
        bare.create_multipart_upload(Bucket=place.bucket, Key=(place / name).prefix)
    owned = entries(place, ours)
    remove(owned)
    other = f"worker_1/{CheckpointName(0, 1, 1)}"
    assert sorted(stored.name for stored in s3.list(place)) == sorted(
        ["notes.txt", f"worker_1/{LATEST}", f"worker_1/{damaged}/{STATE}"]
        + [f"{other}/{file}" for file in (MANIFEST, STATE)]
    )
    assert all(entry.size_bytes or entry.upload_id for entry in owned)
    assert {name for name, _ in s3.uploads(place)} == {"notes.txt", f"worker_1/{damaged}/{STATE}"}


def test_a_missing_file_is_damage_but_a_missing_store_is_not(
    faulty_store: FaultyStore, place: S3Location
) -> None:
    store = S3Store(S3Client(faulty_store.access, retry_seconds=0), place)
    with pytest.raises(CheckpointDamaged):
        store.read(CheckpointName(0, 1), STATE, 1)
    faulty_store.fault = lambda _operation: "503"
    with pytest.raises(CheckpointFailed):
        store.read(CheckpointName(0, 1), STATE, 1)
    with pytest.raises(CheckpointFailed):
        store.latest()
