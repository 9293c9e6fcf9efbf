"""A replica has two sets of arrays: what is committed is never written to."""

import numpy as np
import pytest

from muster.contracts.shards import Position
from muster.training.state_sync import Committed, Replica

SHAPE = {"weights": np.zeros((2, 2), np.float32), "steps": np.zeros((), np.int64)}


def state(value: int) -> dict[str, np.ndarray]:
    return {name: np.full_like(array, value) for name, array in SHAPE.items()}


def at(step: int) -> Committed:
    return Committed(position=Position(step=step))


def test_a_state_from_elsewhere_is_copied() -> None:
    replica, given = Replica(SHAPE), state(3)
    replica.commit(given, at(0))
    given["weights"][:] = 9
    assert replica.state["weights"].tolist() == [[3, 3], [3, 3]]
    assert list(replica.state) == ["steps", "weights"]


def test_the_other_half_is_taken_over_as_it_is_and_the_halves_take_turns() -> None:
    replica = Replica(SHAPE)
    replica.commit(state(0), at(0))
    first = replica.state
    for step in range(1, 5):
        before, new = replica.state, replica.other
        new["weights"][...], new["steps"][...] = step, step
        assert before["steps"] == step - 1
        replica.commit(new, at(step))
        assert (replica.state["steps"], replica.position.step) == (step, step)
        assert np.shares_memory(replica.state["weights"], new["weights"])
    assert np.shares_memory(replica.state["weights"], first["weights"])


def test_what_is_committed_refuses_to_be_written_to() -> None:
    replica = Replica(SHAPE)
    replica.commit(state(1), at(0))
    with pytest.raises(ValueError, match="read-only"):
        replica.state["weights"][0, 0] = 2


def test_a_half_that_was_given_up_in_the_middle_changes_nothing() -> None:
    replica = Replica(SHAPE)
    replica.commit(state(1), at(0))
    digest = replica.digest()
    replica.other["weights"][:] = 7
    assert replica.digest() == digest
