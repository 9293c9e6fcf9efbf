import pkgutil
import select
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from muster.collectives.deadline import Deadline
from muster.collectives.errors import PeerRefused, PeerUnreachable, Timeout, TransportFailed
from muster.collectives.simulated import run_ranks
from muster.collectives.transports.handshake import Membership, answer
from muster.collectives.transports.pending_peers import PENDING_LIMIT, PendingPeers
from muster.collectives.transports.rendezvous import Address, Endpoint, must_seal, rendezvous
from muster.collectives.transports.tcp import RingBackend, TcpBackend
from muster.host.ports import free_port
from muster.links.frames import FrameReader, frame
from muster.links.session import Answerer
from tests.support.strangers import STRANGER, needs_root, socket_of

TOKEN = b"the group's token"
SOON = 0.2
LOOPBACK = "127.0.0.1"
MODULE = "muster.collectives.transports.rendezvous"


def connect(own: Membership, address: Address, **options: object) -> TcpBackend:
    return TcpBackend(own, rendezvous(own, address, **options))


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def member(rank: int, world_size: int) -> Membership:
    return Membership(rank=rank, world_size=world_size, generation=7, token=TOKEN)


class Party:
    """Ranks that meet, each in a thread of its own; rank 0 is there from the beginning."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._threads = ThreadPoolExecutor(world_size)
        listener = listening()
        self.address: Address = listener.getsockname()
        self._coming = [
            self._threads.submit(connect, member(0, world_size), self.address, listener=listener)
        ]

    def complete(self) -> list[TcpBackend]:
        """Let the others come; return the backends once all have met."""
        self._coming += [
            self._threads.submit(connect, member(rank, self._world_size), self.address)
            for rank in range(1, self._world_size)
        ]
        with self._threads:
            return [coming.result() for coming in self._coming]


def all_talk(backends: list[TcpBackend]) -> None:
    def rank(backend: TcpBackend) -> None:
        peers = [peer for peer in range(backend.world_size) if peer != backend.rank]
        for peer in peers:
            backend.send(peer, bytes([backend.rank]))
        assert [backend.recv(peer, 1)[0] for peer in peers] == peers
        backend.barrier()

    run_ranks(backends, rank)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_ranks_meet_and_every_pair_can_talk(world_size: int) -> None:
    all_talk(Party(world_size).complete())


def test_rank_0_may_come_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(connect, member(1, 2), address)
        zero = threads.submit(connect, member(0, 2), address)
        all_talk([zero.result(), one.result()])


def test_ranks_of_a_list_meet_at_their_own_addresses() -> None:
    addresses = [f"127.0.0.{host}:{free_port()}" for host in (1, 1, 2)]
    with ThreadPoolExecutor(3) as threads:
        backends = list(threads.map(lambda rank: RingBackend(addresses, rank), range(3)))
    assert {backend.hosts for backend in backends} == {(0, 0, 1)}
    all_talk(backends)


def test_ranks_whose_lists_name_other_hosts_do_not_meet() -> None:
    ports = [free_port(), free_port()]
    lists = [[f"{first}:{ports[0]}", f"127.0.0.1:{ports[1]}"] for first in ("localhost", LOOPBACK)]
    with ThreadPoolExecutor(1) as threads:
        zero = threads.submit(RingBackend, lists[0], 0, timeout_seconds=SOON)
        with pytest.raises(PeerRefused, match="another token, generation, world size or list of"):
            RingBackend(lists[1], 1)
        with pytest.raises(Timeout, match="ranks 1 and 0 were given different addresses"):
            zero.result()


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda _: None,
    "half a hello": lambda connection: connection.sendall(b"muster"),
    "a web browser": lambda connection: connection.sendall(b"GET / HTTP/1.1\r\n" * 20),
    "gone": lambda connection: connection.close(),
    "a huge length": lambda connection: connection.sendall((2**63).to_bytes(8, "little") * 8),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_stranger_does_not_disturb_the_group(stranger: str) -> None:
    party = Party(3)
    with socket.create_connection(party.address) as connection:
        STRANGERS[stranger](connection)
        all_talk(party.complete())


def test_oldest_of_too_many_strangers_is_closed() -> None:
    party = Party(2)
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(party.address))
            for _ in range(PENDING_LIMIT + 2)  # one more than with the rank that is expected
        ]
        assert strangers[0].recv(1) == b""
        all_talk(party.complete())


@needs_root
def test_another_user_is_disconnected_at_once() -> None:
    party = Party(2)
    with socket_of(STRANGER) as stranger:
        stranger.connect(party.address)
        assert stranger.recv(1) == b""
    all_talk(party.complete())


@pytest.mark.slow
def test_silent_stranger_is_disconnected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.collectives.transports.pending_peers.HELLO_TIMEOUT_SECONDS", 0.0)
    listener = listening()
    address = listener.getsockname()
    with ThreadPoolExecutor(1) as threads, socket.create_connection(address) as stranger:
        group = member(0, 2)
        waiting = threads.submit(connect, group, address, listener=listener, timeout_seconds=1)
        assert stranger.recv(1) == b""
        with pytest.raises(Timeout):
            waiting.result()


@pytest.mark.parametrize(
    "changed",
    [{"token": b"another"}, {"generation": 6}, {"world_size": 4}, {"rank": 3, "world_size": 4}],
)
def test_rank_of_another_group_is_refused(
    changed: dict[str, bytes | int],
) -> None:
    party = Party(3)
    with pytest.raises(PeerRefused):
        connect(replace(member(1, 3), **changed), party.address)
    all_talk(party.complete())


def test_impostor_without_the_token_is_refused() -> None:
    with listening() as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                assert TOKEN not in connection.recv(4096)
                connection.sendall(frame(b"muster\0\1" + bytes(48)))
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerRefused, match="token"):
            connect(member(1, 2), impostor.getsockname())
        thread.join()


def pass_one(reader: socket.socket, writer: socket.socket) -> None:
    """Pass one frame on."""
    frames = FrameReader()
    while not (payloads := frames.feed(reader.recv(frames.missing_bytes))):
        pass
    writer.sendall(frame(payloads[0]))


def test_a_network_cannot_change_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.must_seal", lambda _: True)
    with listening() as relay, listening() as listener, ThreadPoolExecutor(2) as threads:
        address = listener.getsockname()
        zero = threads.submit(connect, member(0, 2), address, listener=listener)
        one = threads.submit(connect, member(1, 2), relay.getsockname())
        at_one, _ = relay.accept()
        with at_one, socket.create_connection(address) as at_zero:
            pass_one(at_one, at_zero)
            pass_one(at_zero, at_one)
            pass_one(at_one, at_zero)
            table = bytearray(at_zero.recv(4096))
            table[-1] ^= 1  # the number of rank 1's host, if it is in clear
            at_one.sendall(table)
            with pytest.raises(PeerRefused, match="was changed, repeated or lost on the way"):
                one.result()
        zero.result().close()


@pytest.mark.slow
def test_missing_rank_times_out() -> None:
    with pytest.raises(Timeout):
        connect(member(0, 2), ("127.0.0.1", 0), listener=listening(), timeout_seconds=SOON)
    with listening() as listener:
        address = listener.getsockname()
    with pytest.raises(Timeout, match=str(address[1])):
        connect(member(1, 2), address, timeout_seconds=SOON)


def test_on_wait_ends_the_rendezvous() -> None:
    def on_wait() -> None:
        raise KeyError

    listener = listening()
    with pytest.raises(KeyError):
        connect(member(0, 2), ("127.0.0.1", 0), listener=listener, on_wait=on_wait)
    assert listener.fileno() == -1, "closed in any case"
    with pytest.raises(KeyError):
        connect(member(1, 2), ("127.0.0.1", 1), on_wait=on_wait)


def meet_at(rank: int, zero: socket.socket, **options: object) -> TcpBackend:
    """Meet as rank 0 or 1 in a group whose rank 0 listens at this socket."""
    address = zero.getsockname()
    endpoints = [Endpoint(*address, 0), Endpoint("127.0.0.1", 0, 0)]
    own = zero.dup() if rank == 0 else listening()
    return connect(member(rank, 2), address, endpoints=endpoints, listener=own, **options)


def test_rank_that_is_not_there_is_unreachable() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(PeerUnreachable, match=str(bound.getsockname()[1])):
            meet_at(1, bound, unreachable_seconds=0.0)


@pytest.mark.slow
def test_rank_that_does_not_answer_is_not_lost() -> None:
    waits = iter(range(20))
    with listening() as computes, pytest.raises(StopIteration):
        meet_at(1, computes, unreachable_seconds=0.0, on_wait=lambda: next(waits))


def test_rank_that_is_still_in_another_group_is_called_again() -> None:
    with listening() as listener, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(meet_at, 1, listener, unreachable_seconds=10.0)
        refused, _ = listener.accept()
        refused.close()
        all_talk([meet_at(0, listener), waiting.result()])


def reset(own: socket.socket, other: socket.socket) -> None:
    """Reset a connection at our end, and wait until the other end has noticed."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    own.close()
    poll = select.poll()
    poll.register(other, 0)
    poll.poll()


@pytest.mark.parametrize("place", [f"{MODULE}._open", f"{MODULE}.must_seal"])
def test_rank_that_resets_is_called_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reset = threading.Event()
    original = pkgutil.resolve_name(place)

    def resetting(*args: object) -> object:
        result = original(*args) if place.endswith("_open") else None
        if not is_reset.is_set():
            reset(listener.accept()[0], result or args[0])
            is_reset.set()
        return result or original(*args)

    monkeypatch.setattr(place, resetting)
    with listening() as listener, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(meet_at, 1, listener, unreachable_seconds=10.0)
        assert is_reset.wait(10.0)
        all_talk([meet_at(0, listener), waiting.result()])


def test_client_that_resets_does_not_end_a_rendezvous() -> None:
    turns = iter(range(3))
    with listening() as listener:
        client = socket.create_connection(listener.getsockname())

        def answering(connection: socket.socket) -> Answerer:
            reset(client, connection)
            return answer(member(0, 2), is_sealed=must_seal(connection))

        pending = PendingPeers(listener, answering)
        with pytest.raises(StopIteration):
            pending.admit({1}, Deadline(10.0, "a rank"), lambda: next(turns))
    assert client.fileno() == -1


def test_taken_address_is_named() -> None:
    with listening() as other, pytest.raises(TransportFailed, match=str(other.getsockname()[1])):
        connect(member(0, 2), other.getsockname())
