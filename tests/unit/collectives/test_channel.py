"""What a peer may send, and what it may not."""

import socket
import struct
from collections.abc import Iterator

import pytest

from muster.collectives.channel import Channel, Kind
from muster.collectives.errors import ChannelClosed, PeerRefused, TimedOut
from muster.collectives.tcp import TcpBackend
from tests.support.groups import GENERATION, LIMIT_BYTES, connected

NOW = 0.0
FAR = 1 << 63

Raw = tuple[TcpBackend, socket.socket, TcpBackend]
"""Rank 0, the raw end of its connection with rank 1, and rank 2, which behaves."""


def frame(length: int, generation: int = GENERATION, kind: int = Kind.MESSAGE) -> bytes:
    return struct.pack("<QQB", length, generation, kind)


@pytest.fixture
def group() -> Iterator[Raw]:
    ends = connected(3)
    zero, two = (
        TcpBackend(rank, 3, ends[rank], generation=GENERATION, limit_bytes=LIMIT_BYTES)
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
        (frame(1, kind=Kind.BARRIER), "with 1 bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", "generation"),
    ],
    ids=["huge", "too long", "old generation", "unknown kind", "long barrier", "garbage"],
)
def test_invalid_frame_closes_only_its_channel(group: Raw, sent: bytes, reason: str) -> None:
    zero, raw, two = group
    raw.sendall(sent)
    with pytest.raises(PeerRefused, match=f"rank 1 broke the protocol: .*{reason}"):
        zero.receive(1, 4)
    with pytest.raises(ChannelClosed):
        zero.receive(1, 4)
    two.send(0, b"unharmed")
    assert zero.receive(2, 8) == b"unharmed"


def test_message_may_arrive_byte_by_byte(group: Raw) -> None:
    zero, raw, _ = group
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in frame(4) + b"data":
        with pytest.raises(TimedOut):
            zero.receive(1, 4, timeout_seconds=NOW)
        raw.sendall(bytes([byte]))
    assert zero.receive(1, 4) == b"data"


def test_timeout_keeps_half_a_received_message(group: Raw) -> None:
    zero, raw, _ = group
    target = bytearray(8)
    raw.sendall(frame(8) + b"half")
    with pytest.raises(TimedOut):
        zero.receive_into(1, memoryview(target), timeout_seconds=0.05)
    target[:] = b"not ours"
    raw.sendall(b"rest" + frame(4) + b"next")
    assert [zero.receive(1, 8), zero.receive(1, 4)] == [b"halfrest", b"next"]
    assert target == b"not ours"


def test_timeout_keeps_half_a_sent_message(group: Raw) -> None:
    zero, raw, two = group
    data = bytearray(b"x" * LIMIT_BYTES)
    with pytest.raises(TimedOut, match="room for a message to rank 1"):
        zero.send(1, data, timeout_seconds=0.05)
    data[:] = bytes(LIMIT_BYTES)
    came = bytearray()
    two.send(0, b"!")
    assert zero.receive(2, 1) == b"!"
    raw.settimeout(0.01)
    while len(came) < len(frame(0)) + LIMIT_BYTES:
        try:
            came += raw.recv(1 << 20)
        except TimeoutError:
            with pytest.raises(TimedOut):
                zero.receive(2, 1, timeout_seconds=NOW)
    assert came == frame(LIMIT_BYTES) + b"x" * LIMIT_BYTES


def test_end_without_a_goodbye_is_a_death(group: Raw) -> None:
    zero, raw, _ = group
    raw.sendall(frame(4) + b"last" + frame(9) + b"half")
    raw.shutdown(socket.SHUT_RDWR)
    assert zero.receive(1, 4) == b"last"
    with pytest.raises(ChannelClosed, match="rank 1"):
        zero.receive(2, 1)


def test_end_with_a_goodbye_is_no_death(group: Raw) -> None:
    zero, raw, _ = group
    raw.sendall(frame(0, kind=Kind.GOODBYE))
    raw.shutdown(socket.SHUT_RDWR)
    with pytest.raises(TimedOut):
        zero.receive(2, 1, timeout_seconds=0.05)


def test_no_goodbye_in_the_middle_of_a_message() -> None:
    own, raw = socket.socketpair()
    channel = Channel(own, 1, generation=GENERATION, limit_bytes=LIMIT_BYTES)
    channel.put(Kind.MESSAGE, memoryview(bytes(LIMIT_BYTES)))
    while channel.send_some():
        pass
    channel.close()
    came = bytearray()
    with raw:
        while data := raw.recv(1 << 20):
            came += data
    assert len(came) < LIMIT_BYTES
    assert not came.endswith(frame(0, kind=Kind.GOODBYE))
