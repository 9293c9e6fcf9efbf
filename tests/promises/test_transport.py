"""The promises of `Backend`, kept by every transport, the simulated one included."""

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
    Timeout,
    Unsupported,
)
from muster.collectives.operations import all_gather_bytes
from muster.collectives.simulated import run_ranks
from tests.support.groups import LIMIT_BYTES, RING_BYTES, TRANSPORTS, Group, shared_memory, tcp

pytestmark = pytest.mark.slow

LARGE = bytes(range(256)) * (LIMIT_BYTES // 256)  # more than any socket takes at once
SIZES = [0, 1, RING_BYTES - 9, RING_BYTES - 8, RING_BYTES, RING_BYTES + 1, 50_000]
SOON = 0.05

Make = Callable[[int], Group]


@pytest.fixture(params=TRANSPORTS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda world_size: stack.enter_context(TRANSPORTS[request.param](world_size))


def peers_of(backend: Backend) -> list[int]:
    return [peer for peer in range(backend.world_size) if peer != backend.rank]


def text(size: int, seed: int = 0) -> bytes:
    return bytes((seed + 7 * at) % 251 for at in range(size))


def test_messages_arrive_whole_once_and_in_order(make: Make) -> None:
    messages = [text(size, seed) for seed, size in enumerate(SIZES * 3)] + [LARGE, b"end"]

    def rank(backend: Backend) -> list[bytes]:
        if backend.rank == 0:
            for message in messages:
                backend.send(1, message)
            return messages
        return [bytes(backend.recv(0, len(message))) for message in messages]

    assert run_ranks(make(2).backends, rank) == [messages, messages]


def test_sent_data_may_be_changed(make: Make) -> None:
    zero, one = make(2).backends
    data = bytearray(b"before")
    zero.send(1, data)
    data[:] = b"after!"
    assert one.recv(0, 6) == b"before"


def test_message_is_put_into_the_target(make: Make) -> None:
    zero, one = make(2).backends
    target = np.zeros(4, np.float32)
    zero.send(1, np.arange(4, dtype=np.float32).data)
    one.recv_into(0, target.data)
    assert target.tolist() == [0, 1, 2, 3]


def test_two_ranks_may_send_to_each_other_at_once(make: Make) -> None:
    def rank(backend: Backend) -> bool:
        peer = 1 - backend.rank
        backend.send(peer, LARGE)
        backend.send(peer, LARGE)
        return all(backend.recv(peer, len(LARGE)) == LARGE for _ in range(2))

    assert run_ranks(make(2).backends, rank) == [True, True]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_exchange_among_all_ranks_cannot_deadlock(make: Make, world_size: int) -> None:
    sizes = [*SIZES, len(LARGE), 3]

    def rank(backend: Backend) -> bool:
        targets = {peer: [bytearray(size) for size in sizes] for peer in peers_of(backend)}
        backend.exchange(
            [(peer, LARGE[:size]) for peer in targets for size in sizes],
            [(peer, memoryview(target)) for peer in targets for target in targets[peer]],
        )
        return all(targets[peer] == [LARGE[:size] for size in sizes] for peer in targets)

    assert all(run_ranks(make(world_size).backends, rank))


def test_pairs_may_be_used_from_different_threads(make: Make) -> None:
    def rank(backend: Backend) -> bool:
        def talk(peer: int) -> None:
            for _ in range(20):
                backend.send(peer, LARGE[:100_000])
                received.append(backend.recv(peer, 100_000) == LARGE[:100_000])

        received: list[bool] = []
        talks = [threading.Thread(target=talk, args=(peer,)) for peer in peers_of(backend)]
        for thread in talks:
            thread.start()
        for thread in talks:
            thread.join()
        return received == [True] * 40

    assert all(run_ranks(make(3).backends, rank))


def test_barrier_waits_for_all_ranks(make: Make) -> None:
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


def test_barrier_keeps_earlier_messages(make: Make) -> None:
    def rank(backend: Backend) -> bytes:
        backend.send(1 - backend.rank, b"early")
        backend.barrier()
        return bytes(backend.recv(1 - backend.rank, 5))

    assert run_ranks(make(2).backends, rank) == [b"early", b"early"]


def test_group_of_one_does_not_wait(make: Make) -> None:
    (backend,) = make(1).backends
    backend.barrier()
    backend.exchange([], [])
    assert all_gather_bytes(backend, b"own") == [b"own"]
    assert (backend.rank, backend.world_size) == (0, 1)


def test_receive_can_be_repeated_after_a_timeout(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(Timeout, match="a message of rank 0"):
        one.recv(0, 4, timeout_seconds=SOON)
    zero.send(1, b"late")
    assert one.recv(0, 4) == b"late"


def test_barrier_can_be_repeated_after_a_timeout(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(Timeout):
        zero.barrier(timeout_seconds=SOON)
    run_ranks([zero, one], lambda backend: backend.barrier())


def test_message_of_another_size_is_refused_and_stays(make: Make) -> None:
    zero, one = make(2).backends
    zero.send(1, b"four")
    zero.send(1, b"next")
    with pytest.raises(SizeMismatch, match="expected a message of 5 bytes from rank 0, got 4"):
        one.recv(0, 5)
    with pytest.raises(SizeMismatch):
        one.recv(0, 3)
    assert [one.recv(0, 4), one.recv(0, 4)] == [b"four", b"next"]


@pytest.mark.parametrize("peer", [-1, 0, 2, 7])
def test_peer_outside_the_group_or_itself_is_refused(make: Make, peer: int) -> None:
    backend = make(2).backends[0]
    error = SelfMessage if peer == 0 else InvalidRank
    with pytest.raises(error):
        backend.send(peer, b"")
    with pytest.raises(error):
        backend.exchange([], [(peer, memoryview(bytearray(1)))])


def test_message_above_the_limit_is_not_sent(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(Unsupported, match="send it in parts"):
        zero.send(1, LARGE + b"!")
    zero.send(1, b"good")
    assert one.recv(0, 4) == b"good"


WAITS: dict[str, Callable[[Backend], object]] = {
    "receive": lambda backend: backend.recv(1, 1),
    "barrier": lambda backend: backend.barrier(),
    "exchange": lambda backend: backend.exchange([(2, b"sent")], [(1, memoryview(bytearray(1)))]),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("lost", [1, 2])
def test_death_of_any_peer_ends_every_wait(make: Make, wait: str, lost: int) -> None:
    group = make(3)
    errors: list[ChannelClosed] = []

    def rank() -> None:
        try:
            WAITS[wait](group.backends[0])
        except ChannelClosed as error:
            errors.append(error)

    waiting = threading.Thread(target=rank)
    waiting.start()
    group.kill(lost)
    waiting.join()
    assert [error.rank for error in errors] == [lost]


def test_messages_of_a_closed_peer_still_arrive(make: Make) -> None:
    zero, one, two = make(3).backends
    one.send(0, b"farewell")
    one.close()
    with pytest.raises(Timeout):
        zero.recv(2, 10, timeout_seconds=SOON)
    two.send(0, b"still here")
    assert zero.recv(2, 10) == b"still here"
    assert zero.recv(1, 8) == b"farewell"
    with pytest.raises(ChannelClosed, match="rank 1 is closed"):
        zero.recv(1, 1)
    with pytest.raises(ChannelClosed, match="rank 1 is closed"):
        zero.barrier()


def test_unread_messages_do_not_lose_sent_ones(make: Make) -> None:
    def rank(backend: Backend) -> bool:
        if backend.rank == 1:
            backend.send(0, LARGE)
            return True
        backend.send(1, b"never read")
        return backend.recv(1, len(LARGE)) == LARGE

    for _ in range(3):
        assert run_ranks(make(2).backends, rank) == [True, True]


def test_rank_may_close_right_after_a_large_message(make: Make) -> None:
    """The goodbye has to find room behind the message, or it would look like a death."""

    def rank(backend: Backend) -> bool:
        if backend.rank == 0:
            backend.send(1, LARGE)
            return True
        if backend.rank == 1:
            came = backend.recv(0, len(LARGE)) == LARGE
            backend.send(2, b"ask")
            return came and backend.recv(2, 6) == b"answer"
        backend.recv(1, 3)
        backend.send(1, b"answer")
        return True

    for _ in range(3):
        assert all(run_ranks(make(3).backends, rank))


def test_rank_may_close_right_after_a_barrier(make: Make) -> None:
    for _ in range(10):
        run_ranks(make(4).backends, lambda backend: backend.barrier())


def test_closed_backend_raises_and_may_be_closed_again(make: Make) -> None:
    backend = make(2).backends[0]
    backend.close()
    backend.close()
    for call in (lambda: backend.send(1, b""), lambda: backend.recv(1, 0), backend.barrier):
        with pytest.raises(ChannelClosed, match="rank 0 is closed"):
            call()


@pytest.mark.parametrize("transport", [tcp, shared_memory])
def test_on_wait_ends_a_wait_and_harms_nothing(transport: Callable[..., Group]) -> None:
    changed = threading.Event()

    def on_wait() -> None:
        if changed.is_set():
            raise KeyError

    with transport(2, on_wait=on_wait) as group:
        zero, one = group.backends
        changed.set()
        for wait in (lambda: zero.recv(1, 4), zero.barrier):
            with pytest.raises(KeyError):
                wait()
        changed.clear()
        one.send(0, b"data")
        assert zero.recv(1, 4) == b"data"


def test_every_rank_gathers_all_data(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.collectives.operations.MESSAGE_BYTES", LIMIT_BYTES)
    parts = [b"", b"one", LARGE + b"in two messages", b"three"]
    gathered = run_ranks(
        make(4).backends, lambda backend: all_gather_bytes(backend, parts[backend.rank]) == parts
    )
    assert gathered == [True] * 4
    with pytest.raises(Timeout):
        all_gather_bytes(make(2).backends[0], b"", timeout_seconds=SOON)


def test_memory_that_is_not_contiguous_is_refused_and_harms_nothing(make: Make) -> None:
    zero, one = make(2).backends
    with pytest.raises(Unsupported, match="contiguous"):
        zero.send(1, memoryview(np.arange(8.0)[::2]))
    with pytest.raises(Unsupported, match="can be written"):
        one.recv_into(0, memoryview(b"read-only"))
    zero.send(1, b"whole")
    assert one.recv(0, 5) == b"whole"
