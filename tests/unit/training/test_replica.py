"""One model on every rank: whole at any moment, and the same to the bit."""

import numpy as np
import pytest

from muster.collectives.errors import ChannelClosed
from muster.contracts.shards import Position
from muster.training.state_sync import EMPTY, Committed, Replica
from tests.support.simulated import SimulatedGroup, run_ranks

SHAPE = {"weights": np.zeros((2, 3), np.float32), "count": np.zeros((), np.int64)}
AT_7 = Committed(position=Position(step=7, consumed=99))


def filled(value: float = 1.5, committed: Committed = AT_7) -> Replica:
    replica = Replica(SHAPE)
    state = {"weights": np.full((2, 3), value, np.float32), "count": np.array(4, np.int64)}
    replica.commit(state, committed)
    return replica


def test_a_new_replica_is_empty_and_behind_everybody() -> None:
    replica = Replica(SHAPE)
    assert replica.is_empty
    assert replica.position.step == -1
    assert not filled().is_empty


def test_nobody_changes_what_is_committed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        filled().state["weights"][0, 0] = 2


def test_equal_bits_have_equal_digests_and_any_other_bit_another() -> None:
    digests = {
        filled().digest(),
        filled(np.nextafter(np.float32(1.5), np.float32(2))).digest(),
        filled(committed=Committed(position=Position(step=8, consumed=99))).digest(),
        filled(committed=Committed(position=Position(step=7, consumed=98))).digest(),
    }
    assert len(digests) == 4
    assert filled().digest() in digests
    assert filled(0.0).digest() != filled(-0.0).digest(), "bits, not values"


def test_the_order_in_which_a_program_names_its_arrays_does_not_matter() -> None:
    other = Replica(SHAPE)
    other.commit(dict(reversed(list(filled().state.items()))), AT_7)
    assert other.digest() == filled().digest()


def test_a_replica_is_given_to_a_newcomer_to_the_bit() -> None:
    giver, taker = filled(), Replica(SHAPE)
    run_ranks(
        SimulatedGroup(2).backends(),
        lambda b: giver.send(b, 1) if b.rank == 0 else taker.receive(b, 0),
    )
    assert taker.committed == AT_7
    assert taker.digest() == giver.digest()


def test_a_transfer_that_is_cut_short_changes_nothing() -> None:
    group = SimulatedGroup(2)
    ours, theirs = group.backends()
    taker = Replica(SHAPE)
    ours.send(1, (200).to_bytes(8, "little"))
    group.kill(0)
    with pytest.raises(ChannelClosed):
        taker.receive(theirs, 0)
    assert taker.is_empty
    assert taker.committed == EMPTY
