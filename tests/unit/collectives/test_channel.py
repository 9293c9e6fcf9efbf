"""What a peer may send, and what it may not."""

import signal
import socket
from collections.abc import Iterator

import pytest

from muster.collectives.backend import MESSAGE, Tag
from muster.collectives.calls import Call
from muster.collectives.errors import (
    Aborted,
    CallMismatch,
    ChannelClosed,
    PeerRefused,
    Timeout,
)
from muster.collectives.transports.channel import HEADER, Channel, Kind
from muster.collectives.transports.rings import RingStream
from muster.collectives.transports.streams import SocketStream
from muster.collectives.transports.tcp import TcpBackend
from tests.support.arenas import Host
from tests.support.groups import GENERATION, LIMIT_BYTES, connected, connections_of, member

NOW = 0.0
FAR = 1 << 63

Raw = tuple[TcpBackend, socket.socket, TcpBackend]
"""Rank 0, the raw end of its connection with rank 1, and rank 2, which behaves."""


def frame(
    length: int, generation: int = GENERATION, kind: int = Kind.MESSAGE, tag: Tag = MESSAGE
) -> bytes:
    return HEADER.pack(length, generation, *tag[:3], kind)


@pytest.fixture
def group() -> Iterator[Raw]:
    ends = connected(3)
    zero, two = (
        TcpBackend(member(rank, 3), connections_of(ends[rank]), limit_bytes=LIMIT_BYTES)
        for rank in (0, 2)
    )
    raw = ends[1].pop(0)
    yield zero, raw, two
    zero.close()
    two.close()
    raw.close()
    for connection in ends[1].values():
        connection.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(FAR), f"with {FAR} bytes"),
        (frame(LIMIT_BYTES + 1), f"with {LIMIT_BYTES + 1} bytes"),
        (frame(4, generation=GENERATION - 1) + b"late", "generation 2, not 3"),
        (frame(0, kind=9), "unknown kind 9"),
        (frame(1, kind=Kind.GOODBYE), "with 1 bytes"),
        (frame(2000, kind=Kind.ABORT), "with 2000 bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: a browser\r\n", "generation"),
    ],
    ids=[
        "huge",
        "too long",
        "old generation",
        "unknown kind",
        "long goodbye",
        "long abort",
        "garbage",
    ],
)
def test_invalid_frame_closes_only_its_channel(group: Raw, sent: bytes, reason: str) -> None:
    zero, raw, two = group
    raw.sendall(sent)
    with pytest.raises(PeerRefused, match=f"rank 1 broke the protocol: .*{reason}"):
        zero.recv(1, 4)
    with pytest.raises(ChannelClosed):
        zero.recv(1, 4)
    two.send(0, b"unharmed")
    assert zero.recv(2, 8) == b"unharmed"


def test_message_may_arrive_byte_by_byte(group: Raw) -> None:
    zero, raw, _ = group
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in frame(4) + b"data":
        with pytest.raises(Timeout):
            zero.recv(1, 4, timeout_seconds=NOW)
        raw.sendall(bytes([byte]))
    assert zero.recv(1, 4) == b"data"


def test_timeout_keeps_half_a_received_message(group: Raw) -> None:
    zero, raw, _ = group
    target = bytearray(8)
    raw.sendall(frame(8) + b"half")
    with pytest.raises(Timeout):
        zero.recv_into(1, memoryview(target), timeout_seconds=0.05)
    target[:] = b"not ours"
    raw.sendall(b"rest" + frame(4) + b"next")
    assert [zero.recv(1, 8), zero.recv(1, 4)] == [b"halfrest", b"next"]
    assert target == b"not ours"


def test_timeout_keeps_half_a_sent_message(group: Raw) -> None:
    zero, raw, two = group
    data = bytearray(b"x" * LIMIT_BYTES)
    with pytest.raises(Timeout, match="room for a message to rank 1"):
        zero.send(1, data, timeout_seconds=0.05)
    data[:] = bytes(LIMIT_BYTES)
    came = bytearray()
    two.send(0, b"!")
    assert zero.recv(2, 1) == b"!"
    raw.settimeout(0.01)
    while len(came) < len(frame(0)) + LIMIT_BYTES:
        try:
            came += raw.recv(1 << 20)
        except TimeoutError:
            with pytest.raises(Timeout):
                zero.recv(2, 1, timeout_seconds=NOW)
    assert came == frame(LIMIT_BYTES) + b"x" * LIMIT_BYTES


def test_end_without_a_goodbye_is_a_death(group: Raw) -> None:
    zero, raw, _ = group
    raw.sendall(frame(4) + b"last" + frame(9) + b"half")
    raw.shutdown(socket.SHUT_RDWR)
    assert zero.recv(1, 4) == b"last"
    with pytest.raises(ChannelClosed, match="rank 1"):
        zero.recv(2, 1)


def test_end_with_a_goodbye_is_no_death(group: Raw) -> None:
    zero, raw, _ = group
    raw.sendall(frame(0, kind=Kind.GOODBYE))
    raw.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Timeout):
        zero.recv(2, 1, timeout_seconds=0.05)


def test_sending_to_a_dead_peer_is_no_signal() -> None:
    own, raw = socket.socketpair()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        raw.close()
        with own, pytest.raises(ChannelClosed):
            SocketStream(own, 1).send([memoryview(b"anybody?")])
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_no_goodbye_in_the_middle_of_a_message() -> None:
    own, raw = socket.socketpair()
    channel = Channel(SocketStream(own, 1), generation=GENERATION, limit_bytes=LIMIT_BYTES)
    channel.put(MESSAGE, memoryview(bytes(LIMIT_BYTES)))
    while channel.send_some():
        pass
    channel.close()
    came = bytearray()
    with raw:
        while data := raw.recv(1 << 20):
            came += data
    assert len(came) < LIMIT_BYTES
    assert not came.endswith(frame(0, kind=Kind.GOODBYE))


def test_messages_of_an_earlier_operation_are_dropped(group: Raw) -> None:
    zero, raw, _ = group
    first, second = Tag(sequence=1), Tag(sequence=2)
    raw.sendall(frame(4, tag=first) + b"late" + frame(4, tag=second) + b"new!")
    target = bytearray(4)
    zero.exchange([], [(1, memoryview(target))], tag=second)
    raw.sendall(frame(5, tag=first) + b"later" + frame(4) + b"next")
    assert zero.recv(1, 4) == b"next"
    assert target == b"new!"


def test_contexts_share_a_connection(group: Raw) -> None:
    zero, raw, _ = group
    raw.sendall(frame(4, tag=Tag(context=7)) + b"ctx7" + frame(4) + b"ctx0")
    assert zero.recv(1, 4) == b"ctx0"
    target = bytearray(4)
    zero.exchange([], [(1, memoryview(target))], tag=Tag(context=7))
    assert target == b"ctx7"


def test_abort_ends_only_its_operation(group: Raw) -> None:
    zero, raw, two = group
    reason = b"this rank has seen enough"
    raw.sendall(frame(len(reason), tag=Tag(sequence=1), kind=Kind.ABORT) + reason)
    with pytest.raises(Aborted, match="rank 1 left the operation: rank 1 has seen enough"):
        zero.exchange([], [(2, memoryview(bytearray(1)))], tag=Tag(sequence=1))
    two.send(0, b"go on")
    assert zero.recv(2, 5) == b"go on"


def test_call_that_differs_ends_a_wait_for_another_rank(group: Raw) -> None:
    """Rank 0 waits for rank 2 only; what rank 1 sent shows that the calls differ."""
    zero, raw, _ = group
    own, other = Call("reduce", "sum", "float32", elements=8), Call("all_reduce", "max", "int64")
    raw.sendall(frame(4, tag=Tag(sequence=1, call=other.code)) + b"data")
    with pytest.raises(CallMismatch, match="rank 1 called all_reduce max of 0 int64"):
        zero.exchange([], [(2, memoryview(bytearray(1)))], tag=Tag(sequence=1, call=own.code))


def test_padding_may_come_later_than_its_message() -> None:
    """One batch of what is sent ends between a message and its padding."""
    group = Host(2)
    sender, receiver = (
        Channel(RingStream(group.flags(rank), 1 - rank), generation=1, limit_bytes=LIMIT_BYTES)
        for rank in range(2)
    )
    messages = [b"", b"", *(bytes([number]) for number in range(9))]
    targets = [bytearray(len(message)) for message in messages]
    receives = [receiver.post_receive(MESSAGE, memoryview(target)) for target in targets]
    for message in messages:
        sender.put(MESSAGE, memoryview(message))
    while sender.is_sending:
        sender.send_some()
        while receiver.read_some():
            pass
    assert receiver.error is None
    assert all(receive.is_done for receive in receives)
    assert targets == messages
