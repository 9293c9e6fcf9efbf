"""Checkpoints that are sent while their connection breaks."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.agents.checkpoint_receiver import CheckpointReceiver
from muster.checkpoints.errors import CheckpointFailed, StaleGeneration
from muster.checkpoints.format import pack
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import STATE as STATE_FILE
from muster.checkpoints.store import manifest_of
from tests.promises.test_checkpoint_store import Interrupted
from tests.support.checkpoint_ranks import unsigned
from tests.support.stores import coordinator
from worker.coordinator import store as coordinator_store

STATE = pack({"weights": np.arange(1 << 20)})


def break_connections() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, CheckpointReceiver):
            thread.end()


def test_a_broken_commit_is_made_again(tmp_path: Path) -> None:
    with coordinator(tmp_path) as place:
        store = place.open()
        store.claim(0, "uid")
        packed = replace(STATE, buffers=Interrupted([*STATE.buffers], break_connections))
        name, _ = store.commit(unsigned(packed, 0, 5), packed)
        assert (store.latest(), store.names()) == (name, [name])


def test_a_successor_fences_a_commit_that_is_made_again(tmp_path: Path) -> None:
    def replace_it() -> None:
        place.open().claim(1, "uid")
        break_connections()

    with coordinator(tmp_path) as place:
        store = place.open()
        store.claim(0, "uid")
        packed = replace(STATE, buffers=Interrupted([*STATE.buffers], replace_it))
        with pytest.raises(StaleGeneration):
            store.commit(unsigned(packed, 0, 5), packed)
        assert place.open().names() == []


def test_of_two_claims_of_a_generation_the_later_one_holds(tmp_path: Path) -> None:
    earlier, later = (LocalStore(tmp_path, writer=digit * 16) for digit in "ab")
    names = []

    def replace_it() -> None:
        later.claim(0, "uid")
        names.append(later.commit(unsigned(STATE, 0, 7), STATE)[0])

    earlier.claim(0, "uid")
    kept, _ = earlier.commit(unsigned(STATE, 0, 4), STATE)
    for step in 5, 6:
        packed = replace(STATE, buffers=Interrupted([*STATE.buffers], replace_it))
        with pytest.raises(StaleGeneration):
            earlier.commit(unsigned(packed, 0, step), packed)
    with pytest.raises(StaleGeneration):
        earlier.rewind(kept)
    assert (later.latest(), set(later.names())) == (names[-1], {kept, *names})
    assert all(manifest_of(later, name).files for name in names)


def test_saves_repeated_at_any_moment_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is cut while its end still works, and the same save is made at once."""
    monkeypatch.setattr(coordinator_store, "RETRY_SECONDS", 0.0)
    packed = pack({"weights": np.arange(5 << 17)})
    with coordinator(tmp_path) as place:
        store = place.open()
        store.claim(0, "uid")
        for step in range(80):
            cutting = threading.Timer(step % 20 / 1000, break_connections)
            cutting.start()
            name, _ = store.commit(unsigned(packed, 0, step), packed)
            cutting.join()
            assert store.latest() == name
            read = store.read(name, STATE_FILE, 1 << 23)
            assert len(read) == packed.size_bytes
            for older in store.names():
                if older != name:
                    store.remove(older)


def test_without_a_coordinator_a_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_store, "REACH_SECONDS", 0.5)
    with coordinator(tmp_path) as place:
        store = place.open()
        store.claim(0, "uid")
    with pytest.raises(CheckpointFailed, match=r"the coordinator, which keeps .* cannot"):
        store.commit(unsigned(STATE, 0, 5), STATE)
