"""One model on every rank: whole at any moment, and the same to the bit."""

import numpy as np
import pytest

from muster.collectives.errors import ChannelClosed
from muster.collectives.simulated import SimulatedBackend, run_ranks
from muster.contracts.shards import Position
from muster.training.groups.state_sync import EMPTY, Committed, Replica

SHAPE = {"weights": np.zeros((2, 3), np.float32), "count": np.zeros((), np.int64)}


def state(value: float) -> dict[str, np.ndarray]:
    return {"weights": np.full((2, 3), value, np.float32), "count": np.array(4, np.int64)}


def at(step: int, consumed: int = 99) -> Committed:
    return Committed(position=Position(step=step, consumed=consumed))


def filled(value: float = 1.5, committed: Committed | None = None) -> Replica:
    replica = Replica(SHAPE)
    replica.commit(state(value), committed or at(7))
    return replica


def test_new_replica_is_empty() -> None:
    replica = Replica(SHAPE)
    assert replica.is_empty
    assert replica.position.step == -1
    assert not filled().is_empty


def test_committed_state_is_a_read_only_copy() -> None:
    replica, given = Replica(SHAPE), state(3)
    replica.commit(given, at(0))
    given["weights"][:] = 9
    assert (replica.state["weights"] == 3).all()
    assert list(replica.state) == ["count", "weights"]
    with pytest.raises(ValueError, match="read-only"):
        replica.state["weights"][0, 0] = 2


def test_two_sets_of_arrays_take_turns() -> None:
    replica = filled(0)
    first = replica.state
    for step in range(1, 5):
        before, new = replica.state, replica.other
        digest = replica.digest()
        new["weights"][...], new["count"][...] = step, step
        assert replica.digest() == digest, "what is committed is not written to"
        assert not np.shares_memory(before["weights"], new["weights"])
        replica.commit(new, at(step))
        assert (replica.state["count"], replica.position.step) == (step, step)
        assert np.shares_memory(replica.state["weights"], new["weights"])
    assert np.shares_memory(replica.state["weights"], first["weights"])


def test_digest_covers_every_bit_and_the_position() -> None:
    digests = {
        filled().digest(),
        filled(np.nextafter(np.float32(1.5), np.float32(2))).digest(),
        filled(0.0).digest(),
        filled(-0.0).digest(),
        filled(committed=at(8)).digest(),
        filled(committed=at(7, consumed=98)).digest(),
    }
    assert len(digests) == 6
    other = Replica(SHAPE)
    other.commit(dict(reversed(state(1.5).items())), at(7))
    assert other.digest() == filled().digest(), "the order of the names does not count"


def test_replica_is_sent_to_the_bit() -> None:
    sender, receiver = filled(), Replica(SHAPE)
    run_ranks(
        SimulatedBackend.create_group(2),
        lambda b: sender.send(b, 1) if b.rank == 0 else receiver.receive(b, 0),
    )
    assert receiver.committed == at(7)
    assert receiver.digest() == sender.digest()


def test_interrupted_transfer_changes_nothing() -> None:
    ours, theirs = SimulatedBackend.create_group(2)
    receiver = Replica(SHAPE)
    ours.send(1, (200).to_bytes(8, "little"))
    ours.kill()
    with pytest.raises(ChannelClosed):
        receiver.receive(theirs, 0)
    assert receiver.committed == EMPTY
