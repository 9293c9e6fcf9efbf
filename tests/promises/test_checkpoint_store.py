"""The promises of `CheckpointStore`, kept by every implementation."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from muster.checkpoints.comparison import differences
from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointError,
    StaleGeneration,
    UnsupportedState,
)
from muster.checkpoints.format import State, pack
from muster.checkpoints.manifest import MANIFEST, STATE, WITNESS, CheckpointName
from muster.checkpoints.reader import CheckpointReader
from muster.checkpoints.store import CheckpointStore, manifest_of
from tests.support.checkpoint_ranks import manager_of, owner, position, state, unsigned
from tests.support.stores import PLACES, Place

SAVES, SAVING_SECONDS = 100, 10


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name in {"s3", "coordinator"}))
        for name in PLACES
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with PLACES[request.param](tmp_path) as made:
        yield made


class Killed(BaseException):
    """The writer was killed: no handler runs."""


class Interrupted(list[memoryview]):
    """Buffers that do something before they are read: the commit has begun by then."""

    def __init__(self, buffers: list[memoryview], act: Callable[[], object]) -> None:
        super().__init__(buffers)
        self._acts = [act]

    def __iter__(self) -> Iterator[memoryview]:
        if self._acts:
            self._acts.pop()()
        return super().__iter__()


def commit(
    store: CheckpointStore,
    generation: int,
    step: int,
    content: State | None = None,
    *,
    uid: str | None = "uid",
    act: Callable[[], object] = lambda: None,
) -> CheckpointName:
    packed = pack(state(generation, step) if content is None else content)
    packed = replace(packed, buffers=Interrupted(packed.buffers, act)) if packed.buffers else packed
    name, manifest = store.commit(unsigned(packed, generation, step, uid), packed)
    assert manifest_of(store, name) == manifest
    return name


def claimed(place: Place, generation: int | None, uid: str | None = "uid") -> CheckpointStore:
    store = place.open()
    store.claim(generation, uid)
    return store


def reader(store: CheckpointStore, warnings: list[str] | None = None) -> CheckpointReader:
    warn = [] if warnings is None else warnings
    return CheckpointReader(store=store, rank=0, world_size=2, warn=warn.append)


def test_an_unused_place_is_empty_and_stays_so(place: Place) -> None:
    store = place.open()
    assert (store.latest(), store.names(), [*store.by_trust()], store.ranks()) == (None, [], [], [])
    with pytest.raises(CheckpointDamaged):
        store.read(CheckpointName(0, 1), MANIFEST, 1000)
    assert place.entries() == set()


@pytest.mark.parametrize("uid", ["uid", None])
@pytest.mark.parametrize(
    "content",
    [
        {"weights": np.ones(40), "loss": None},
        {"loss": 0.5},
        {},
        {"weights": np.arange(1 << 18, dtype=np.float32)},
    ],
    ids=["small", "without arrays", "empty", "1 MB"],
)
def test_committed_bytes_are_read_back(place: Place, content: State, uid: str | None) -> None:
    name = commit(claimed(place, 0, uid), 0, 5, content, uid=uid)
    found = reader(place.open()).newest()
    assert found is not None
    assert (found.name, found.position, found.manifest.job_uid) == (name, position(5), uid)
    assert differences(found.state, content) == []


def test_latest_moves_when_the_checkpoint_is_whole(place: Place) -> None:
    store, other, seen = claimed(place, 0), place.open(), []
    first = commit(store, 0, 1)
    second = commit(store, 0, 2, act=lambda: seen.append((other.latest(), other.names())))
    assert seen == [(first, [first])]
    assert (other.latest(), sorted(other.names())) == (second, [first, second])


def test_trust_orders_by_generation_then_latest(place: Place) -> None:
    first = claimed(place, 0)
    later, back = commit(first, 0, 9), commit(first, 0, 5)
    assert [*place.open().by_trust()] == [back, later]
    newer = commit(claimed(place, 1), 1, 2)
    assert [*place.open().by_trust()] == [newer, later, back]


def test_older_generation_cannot_commit(place: Place) -> None:
    stale = claimed(place, 3)
    kept = commit(stale, 3, 1)
    claimed(place, 4)
    with pytest.raises(StaleGeneration):
        commit(stale, 3, 2)
    with pytest.raises(StaleGeneration):
        place.open().claim(3, "uid")
    assert place.open().latest() == kept


def test_only_the_newest_writer_goes_back(place: Place) -> None:
    stale = claimed(place, 0)
    kept, later = commit(stale, 0, 1), commit(stale, 0, 2)
    writer = claimed(place, 1)
    writer.rewind(kept)
    assert place.open().latest() == kept
    with pytest.raises(StaleGeneration):
        stale.rewind(later)
    writer.remove(later)
    newest = commit(writer, 1, 2)
    assert [*place.open().by_trust()] == [newest, kept]


@pytest.mark.parametrize("steps", [(), (1,), (1, 2, 3, 4)], ids=["first", "second", "recycled"])
def test_commit_that_has_begun_is_fenced_too(place: Place, steps: tuple[int, ...]) -> None:
    stale, successor, left = claimed(place, 0), place.open(), []
    names = [commit(stale, 0, step) for step in steps]
    for name in names[:-2]:
        stale.remove(name)

    def take_over() -> None:
        successor.claim(1, "uid")
        left.append(place.entries())

    with pytest.raises(StaleGeneration):
        commit(stale, 0, 8, act=take_over)
    whole = {name.split("/")[0] for name in left[0]}
    assert whole == {str(name) for name in names[-2:]}, "the claim removes unfinished commits"
    # A store may keep what the older writer put, but no restart begins with it.
    assert place.entries() >= left[0]
    assert successor.latest() == (names[-1] if names else None)
    for name in {*successor.names()} - {*names}:
        successor.remove(name)
    assert place.entries() == left[0]
    newest = commit(successor, 1, 8)
    assert successor.latest() == newest


def test_place_of_another_job_is_taken_over(place: Place) -> None:
    theirs = commit(claimed(place, 7, "old"), 7, 1, uid="old")
    store = place.open()
    assert store.claim(0, "new") == 0
    ours = commit(store, 0, 1, uid="new")
    assert (store.latest(), sorted(store.names())) == (ours, [ours, theirs])
    assert reader(store).load(theirs).manifest.job_uid == "old"


def test_started_by_hand_gets_the_next_generation(place: Place) -> None:
    commit(claimed(place, 7, "job"), 7, 1, uid="job")
    first, second = place.open(), place.open()
    assert first.claim(None, None) == 8
    commit(first, 8, 2, uid=None)
    assert second.claim(None, None) == 9
    with pytest.raises(StaleGeneration):
        commit(first, 8, 3, uid=None)
    assert second.claim(9, None) == 9


def test_taken_names_get_a_revision(place: Place) -> None:
    old = claimed(place, 2, "old")
    names = [commit(old, 2, 4, uid="old") for _ in range(2)]
    names.append(commit(claimed(place, 2, "new"), 2, 4, uid="new"))
    assert names == [CheckpointName(2, 4, revision) for revision in range(3)]
    assert sorted(place.open().names()) == names


def refused(_store: CheckpointStore) -> None:
    commit(_store, 0, 2, {"weights": np.ones(3), "values": "x" * (17 << 20)})


def killed(_store: CheckpointStore) -> None:
    def die() -> None:
        raise Killed

    commit(_store, 0, 2, act=die)


@pytest.mark.parametrize("failing", [refused, killed])
def test_failed_commit_leaves_everything(
    place: Place, failing: Callable[[CheckpointStore], None]
) -> None:
    store = claimed(place, 0)
    first = commit(store, 0, 1)
    before = place.entries()
    with pytest.raises((UnsupportedState, Killed)):
        failing(store)
    assert (place.open().latest(), place.open().names()) == (first, [first])
    successor = claimed(place, 1)
    assert place.entries() == before
    assert successor.latest() == first
    second = commit(successor, 1, 2)
    assert place.open().latest() == second


@pytest.mark.parametrize("file", [MANIFEST, STATE])
@pytest.mark.parametrize("content", [None, b"", b"{}" * 400], ids=["gone", "empty", "other bytes"])
def test_damaged_file_is_never_restored(place: Place, file: str, content: bytes | None) -> None:
    store, warnings = claimed(place, 0), []
    intact, damaged = commit(store, 0, 1), commit(store, 0, 2)
    place.damage(damaged, file, content)
    with pytest.raises(CheckpointDamaged):
        reader(place.open()).load(damaged)
    found = reader(place.open(), warnings).newest()
    assert found is not None
    assert found.name == intact
    assert "LATEST" in warnings[-1]


def test_file_above_the_limit_is_damaged(place: Place) -> None:
    store = claimed(place, 0)
    name = commit(store, 0, 1)
    with pytest.raises(CheckpointDamaged):
        store.read(name, MANIFEST, 10)


def test_removed_checkpoint_is_gone_others_stay(place: Place) -> None:
    store = claimed(place, 0)
    first, second, third = (commit(store, 0, step) for step in (1, 2, 3))
    for _ in range(2):
        store.remove(second)
    assert sorted(place.open().names()) == [first, third]
    with pytest.raises(CheckpointDamaged):
        place.open().read(second, MANIFEST, 10_000)
    store.close()
    assert {entry.split("/")[0] for entry in place.entries()} == {str(first), str(third)}
    store.claim(0, "uid")
    assert commit(store, 0, 2).step == 2, "after the next claim it goes on"


def test_a_witness_goes_with_its_checkpoint(place: Place) -> None:
    store, kept = claimed(place, 0), []
    for step in range(1, 6):
        kept.append(commit(store, 0, step))
        with pytest.raises(CheckpointDamaged):
            place.open().read(kept[-1], WITNESS, 100)
        store.put_witness(kept[-1], b"%d" % step)
        assert place.open().read(kept[-1], WITNESS, 100) == b"%d" % step
        if step > 2:
            store.remove(kept.pop(0))
    with suppress(CheckpointError):
        store.put_witness(CheckpointName(0, 1), b"late")
    successor = claimed(place, 1)
    assert {entry.split("/")[0] for entry in place.entries()} == {str(it) for it in kept}
    for name in kept:
        successor.remove(name)
    assert place.entries() == set()


def test_ranks_have_places_of_their_own(place: Place) -> None:
    for rank in (10, 2):
        store = place.open_rank(rank)
        store.claim(0, "uid")
        commit(store, 0, rank)
    assert place.open().ranks() == [2, 10]
    assert (place.open().latest(), place.open().names()) == (None, [])
    assert place.open_rank(2).latest() == CheckpointName(0, 2)
    assert place.open_rank(2).ranks() == []


@pytest.mark.slow
def test_readers_never_fail_while_a_writer_retires(place: Place) -> None:
    warnings: list[str] = []
    manager = manager_of(place.open(), owner(), warnings.append)
    manager.save(0, position(0), state(0, 0))
    is_over = threading.Event()
    found: list[list[CheckpointName]] = [[], []]

    def read(names: list[CheckpointName]) -> None:
        look = reader(place.open(), warnings)
        while not is_over.is_set():
            checkpoint = look.newest()
            assert checkpoint is not None
            assert checkpoint.state["bias"] == checkpoint.step
            names.append(checkpoint.name)

    threads = [threading.Thread(target=read, args=(names,)) for names in found]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SAVING_SECONDS
    for step in range(1, SAVES):
        manager.save(step, position(step), state(0, step))
        if time.monotonic() > until:
            break
    is_over.set()
    for thread in threads:
        thread.join()
    for names in found:
        assert names
        assert names == sorted(names)
    assert [said for said in warnings if "of its time on saving" not in said] == []
