"""Checkpoints that are sent while their connection breaks."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.checkpoint_receiver import CheckpointReceiver
from muster.checkpoints.errors import CheckpointFailed, StaleGeneration
from muster.checkpoints.format import pack
from tests.promises.test_checkpoint_store import Interrupted
from tests.support.checkpoint_ranks import unsigned
from tests.support.stores import coordinator
from worker import coordinator_store

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


def test_without_a_coordinator_a_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_store, "REACH_SECONDS", 0.5)
    with coordinator(tmp_path) as place:
        store = place.open()
        store.claim(0, "uid")
    with pytest.raises(CheckpointFailed, match=r"the coordinator, which keeps .* cannot"):
        store.commit(unsigned(STATE, 0, 5), STATE)
