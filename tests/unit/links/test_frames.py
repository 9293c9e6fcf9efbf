"""Frames in whatever pieces they come."""

import struct
import tracemalloc

import pytest

from muster.contracts.errors import WireError
from muster.links.frames import CONTROL_FRAME_LIMIT_BYTES, FrameReader, frame

PAYLOADS = [b"", b"a", b"\x00" * 9, b"hello" * 5, b""]
STREAM = b"".join(map(frame, PAYLOADS))


def test_frame_layout() -> None:
    assert frame(b"abc") == b"\x03\0\0\0\0\0\0\0abc"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000])
def test_frames_in_pieces_are_reassembled(size: int) -> None:
    reader = FrameReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [payload for piece in pieces for payload in reader.feed(piece)] == PAYLOADS
    assert reader.feed(frame(b"abc")[:-1]) == reader.feed(b"") == []
    assert reader.feed(b"c") == [b"abc"]


@pytest.mark.parametrize("length", [CONTROL_FRAME_LIMIT_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_huge_length_is_refused_without_allocation(length: int) -> None:
    reader = FrameReader()
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=f"announced a frame of {length} bytes"):
            reader.feed(struct.pack("<Q", length))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_length_is_checked_at_once() -> None:
    reader = FrameReader(limit_bytes=3)
    assert reader.feed(frame(b"abc")) == [b"abc"]
    assert reader.feed(frame(b"abcd")[:7]) == []
    with pytest.raises(WireError):
        reader.feed(frame(b"abcd")[7:8])


def test_longest_frame_passes_and_a_longer_one_is_refused() -> None:
    longest = b"x" * CONTROL_FRAME_LIMIT_BYTES
    assert FrameReader().feed(frame(longest)) == [longest]
    with pytest.raises(WireError, match=f"a message of {len(longest) + 1} bytes"):
        frame(longest + b"x")


def test_the_missing_bytes_complete_one_payload() -> None:
    reader, stream, pieces = FrameReader(), b"".join(map(frame, PAYLOADS)), []
    while stream:
        missing = reader.missing_bytes
        pieces.append(reader.feed(stream[:missing]))
        stream = stream[missing:]
    assert [payload for piece in pieces for payload in piece] == PAYLOADS
    assert max(map(len, pieces)) == 1
