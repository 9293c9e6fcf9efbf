"""What `Backend` promises, kept by every transport."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from muster.collectives.backend import Backend
from muster.collectives.errors import (
    ChannelClosed,
    InvalidRank,
    SelfMessage,
    SizeMismatch,
    TimedOut,
    Unsupported,
)
from muster.collectives.gathering import all_gather, broadcast
from muster.collectives.message_reducer import MessageReducer
from muster.collectives.simulated import run_ranks
from muster.collectives.tree import assign_blocks
from tests.support.groups import LIMIT_BYTES, TRANSPORTS, Group

pytestmark = pytest.mark.slow

LARGE = bytes(range(256)) * (LIMIT_BYTES // 256)  # more than any socket takes at once
NOW = 0.0
SOON = 0.05

Make = Callable[[int], Group]


@pytest.fixture(params=TRANSPORTS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda world_size: stack.enter_context(TRANSPORTS[request.param](world_size))


def test_messages_of_a_pair_arrive_whole_once_and_in_order(make: Make) -> None:
    messages = [b"one", b"", b"three" * 1000, LARGE, b"five"]

    def rank(backend: Backend) -> list[bytes]:
        if backend.rank == 0:
            for message in messages:
                backend.send(1, message)
            return messages
        return [bytes(backend.receive(0, len(message))) for message in messages]

    assert run_ranks(make(2).backends, rank) == [messages, messages]


def test_every_pair_can_talk(make: Make) -> None:
    def rank(backend: Backend) -> list[bytes]:
        peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
        for peer in peers:
            backend.send(peer, b"%d to %d" % (backend.rank, peer))
        return [bytes(backend.receive(peer, 6)) for peer in peers]

    for own, heard in enumerate(run_ranks(make(4).backends, rank)):
        assert heard == [b"%d to %d" % (peer, own) for peer in range(4) if peer != own]


def test_what_was_sent_may_be_changed(make: Make) -> None:
    zero, one = make(2).backends
    data = bytearray(b"before")
    zero.send(1, data)
    data[:] = b"after!"
    assert one.receive(0, 6) == b"before"


def test_a_message_is_put_where_it_is_wanted(make: Make) -> None:
    zero, one = make(2).backends
    target = np.zeros(4, np.float32)
    zero.send(1, np.arange(4, dtype=np.float32).data)
    one.receive_into(0, target.data)
    assert target.tolist() == [0, 1, 2, 3]


def test_two_ranks_may_send_to_each_other_at_the_same_time(make: Make) -> None:
    def rank(backend: Backend) -> bool:
        peer = 1 - backend.rank
        backend.send(peer, LARGE)
        backend.send(peer, LARGE)
        return all(backend.receive(peer, len(LARGE)) == LARGE for _ in range(2))

    assert run_ranks(make(2).backends, rank) == [True, True]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_whatever_all_ranks_exchange_goes_through(make: Make, world_size: int) -> None:
    def rank(backend: Backend) -> bool:
        peers = [peer for peer in range(world_size) if peer != backend.rank]
        targets = {peer: [bytearray(len(LARGE)), bytearray(3)] for peer in peers}
        backend.exchange(
            [(peer, part) for peer in peers for part in (LARGE, b"end")],
            [(peer, memoryview(target)) for peer in peers for target in targets[peer]],
        )
        return all(targets[peer] == [LARGE, b"end"] for peer in peers)

    assert all(run_ranks(make(world_size).backends, rank))


def test_different_pairs_may_be_used_from_different_threads(make: Make) -> None:
    def rank(backend: Backend) -> bool:
        def talk(peer: int) -> None:
            for _ in range(20):
                backend.send(peer, LARGE[:100_000])
                heard.append(backend.receive(peer, 100_000) == LARGE[:100_000])

        heard: list[bool] = []
        talks = [
            threading.Thread(target=talk, args=(peer,)) for peer in range(3) if peer != backend.rank
        ]
        for thread in talks:
            thread.start()
        for thread in talks:
            thread.join()
        return heard == [True] * 40

    assert all(run_ranks(make(3).backends, rank))


def test_nobody_passes_a_barrier_before_all_have_come(make: Make) -> None:
    come: list[int] = []

    def rank(backend: Backend) -> list[int]:
        seen = []
        for _ in range(20):
            come.append(backend.rank)
            backend.barrier()
            seen.append(len(come))
            backend.barrier()
        return seen

    for seen in run_ranks(make(4).backends, rank):
        assert seen == [4 * (number + 1) for number in range(20)]


def test_a_barrier_leaves_the_messages_before_it_alone(make: Make) -> None:
    def rank(backend: Backend) -> bytes:
        backend.send(1 - backend.rank, b"early")
        backend.barrier()
        return bytes(backend.receive(1 - backend.rank, 5))

    assert run_ranks(make(2).backends, rank) == [b"early", b"early"]


def test_after_a_timeout_the_next_message_comes_as_if_nothing_had_been(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(TimedOut, match="a message of rank 0"):
        one.receive(0, 4, timeout_seconds=SOON)
    zero.send(1, b"late")
    assert one.receive(0, 4) == b"late"


def test_a_barrier_that_timed_out_can_be_come_to_again(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(TimedOut):
        zero.barrier(timeout_seconds=SOON)
    run_ranks([zero, one], lambda backend: backend.barrier())


def test_a_message_of_another_size_is_refused_and_stays(make: Make) -> None:
    zero, one = make(2).backends
    zero.send(1, b"four")
    zero.send(1, b"next")
    with pytest.raises(SizeMismatch, match="expected a message of 5 bytes, got 4"):
        one.receive(0, 5)
    with pytest.raises(SizeMismatch):
        one.receive(0, 3)
    assert [one.receive(0, 4), one.receive(0, 4)] == [b"four", b"next"]


@pytest.mark.parametrize("peer", [-1, 2, 7])
def test_there_is_no_talking_to_a_rank_that_is_not_there(make: Make, peer: int) -> None:
    backend = make(2).backends[0]
    with pytest.raises(InvalidRank):
        backend.send(peer, b"")
    with pytest.raises(InvalidRank):
        backend.receive(peer, 0)


def test_there_is_no_talking_to_oneself(make: Make) -> None:
    backend = make(2).backends[1]
    with pytest.raises(SelfMessage):
        backend.send(1, b"")
    with pytest.raises(SelfMessage):
        backend.exchange([], [(1, memoryview(bytearray(1)))])


def test_a_message_that_the_other_end_would_refuse_is_not_sent(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(Unsupported, match="send it in parts"):
        zero.send(1, LARGE + b"!")
    zero.send(1, b"good")
    assert one.receive(0, 4) == b"good"


@pytest.mark.parametrize("wait", ["receive", "barrier", "exchange"])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_death_is_noticed_whoever_is_waited_for(make: Make, wait: str, lost: int) -> None:
    group = make(3)
    waits: dict[str, Callable[[Backend], object]] = {
        "receive": lambda backend: backend.receive(1, 1),
        "barrier": lambda backend: backend.barrier(),
        "exchange": lambda backend: backend.exchange(
            [(2, b"sent")], [(1, memoryview(bytearray(1)))]
        ),
    }
    errors: list[BaseException] = []

    def rank() -> None:
        try:
            waits[wait](group.backends[0])
        except ChannelClosed as error:
            errors.append(error)

    waiting = threading.Thread(target=rank)
    waiting.start()
    group.kill(lost)
    waiting.join()
    assert [error.rank for error in errors if isinstance(error, ChannelClosed)] == [lost]


def test_what_a_rank_sent_before_it_closed_still_comes(make: Make) -> None:
    zero, one, two = make(3).backends
    one.send(0, b"farewell")
    one.close()
    two.send(0, b"still here")
    assert zero.receive(2, 10) == b"still here"
    assert zero.receive(1, 8) == b"farewell"
    with pytest.raises(ChannelClosed, match="rank 1 is closed"):
        zero.receive(1, 1)


def test_what_a_rank_left_unread_does_not_cost_what_it_sent(make: Make) -> None:
    def rank(backend: Backend) -> bool:
        if backend.rank == 1:
            backend.send(0, LARGE)
            return True
        backend.send(1, b"never read")
        return backend.receive(1, len(LARGE)) == LARGE

    for _ in range(3):
        assert run_ranks(make(2).backends, rank) == [True, True]


def test_a_rank_that_sent_much_may_go_at_once(make: Make) -> None:
    """Its goodbye has to find room behind what it sent: else it would look like a death."""

    def rank(backend: Backend) -> bool:
        if backend.rank == 0:
            backend.send(1, LARGE)
            return True
        if backend.rank == 1:
            came = backend.receive(0, len(LARGE)) == LARGE
            backend.send(2, b"ask")
            return came and backend.receive(2, 6) == b"answer"
        backend.receive(1, 3)
        backend.send(1, b"answer")
        return True

    for _ in range(3):
        assert all(run_ranks(make(3).backends, rank))


def test_a_rank_that_is_done_may_go_while_others_finish(make: Make) -> None:
    zero, one, two = make(3).backends
    one.close()
    with pytest.raises(TimedOut):
        zero.receive(2, 1, timeout_seconds=SOON)
    two.send(0, b"!")
    assert zero.receive(2, 1) == b"!"
    with pytest.raises(ChannelClosed, match="rank 1 is closed"):
        zero.barrier()


def test_leaving_right_after_a_barrier_disturbs_nobody(make: Make) -> None:
    for _ in range(10):
        run_ranks(make(4).backends, lambda backend: backend.barrier())


def test_a_closed_backend_says_so_and_may_be_closed_again(make: Make) -> None:
    backend = make(2).backends[0]
    backend.close()
    backend.close()
    for call in (lambda: backend.send(1, b""), lambda: backend.receive(1, 0), backend.barrier):
        with pytest.raises(ChannelClosed, match="rank 0 is closed"):
            call()


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("data", [b"", b"small", LARGE])
def test_a_broadcast_reaches_all(make: Make, root: int, data: bytes) -> None:
    def rank(backend: Backend) -> bool:
        return broadcast(backend, data if backend.rank == root else None, root=root) == data

    assert run_ranks(make(4).backends, rank) == [True] * 4


def test_everybody_gathers_what_everybody_has(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.collectives.gathering.MESSAGE_BYTES", LIMIT_BYTES)
    parts = [b"", b"one", LARGE + b"in two messages", b"three"]

    def rank(backend: Backend) -> bool:
        return all_gather(backend, parts[backend.rank]) == parts

    assert run_ranks(make(4).backends, rank) == [True] * 4


def test_gathering_takes_no_longer_than_it_may(make: Make) -> None:
    backend = make(2).backends[0]
    with pytest.raises(TimedOut):
        all_gather(backend, b"", timeout_seconds=SOON)
    with pytest.raises(InvalidRank):
        broadcast(backend, b"", root=2)


@pytest.mark.slow
def test_a_sum_has_the_same_bits_over_every_transport(make: Make) -> None:
    leaves = np.random.default_rng(0).standard_normal((8, 700_000)).astype(np.float32)
    layout = assign_blocks([()] * 3, 8)

    def tree(start: int, stop: int) -> np.ndarray:
        middle = (start + stop) // 2
        return leaves[start] if stop == start + 1 else tree(start, middle) + tree(middle, stop)

    def rank(backend: Backend) -> bytes:
        reducer = MessageReducer(backend, np.zeros((4, 700_000), np.float32))
        for slot, block in zip(reducer.slots, layout[backend.rank], strict=False):
            slot[:] = tree(block.start, block.stop)
        return reducer.all_reduce(layout).tobytes()

    assert run_ranks(make(3).backends, rank) == [tree(0, 8).tobytes()] * 3
