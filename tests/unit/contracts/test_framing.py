import struct
import tracemalloc

import pytest

from muster.contracts.errors import WireError
from muster.contracts.framing import CONTROL_FRAME_LIMIT_BYTES, FrameReader, frame

PAYLOADS = [b"", b"a", b"\x00" * 9, b"hello" * 5, b""]
STREAM = b"".join(map(frame, PAYLOADS))


def test_a_frame_is_a_little_endian_length_and_the_payload() -> None:
    assert frame(b"abc") == b"\x03\0\0\0\0\0\0\0abc"


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_wherever_a_stream_is_cut_the_same_payloads_come_out(cut: int) -> None:
    reader = FrameReader()
    assert reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:]) == PAYLOADS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000])
def test_in_pieces_of_any_size_the_same_payloads_come_out(size: int) -> None:
    reader = FrameReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [payload for piece in pieces for payload in reader.feed(piece)] == PAYLOADS


def test_half_a_frame_is_not_handed_out() -> None:
    reader = FrameReader()
    assert reader.feed(frame(b"abc")[:-1]) == []
    assert reader.feed(b"") == []
    assert reader.feed(b"c") == [b"abc"]


@pytest.mark.parametrize("length", [CONTROL_FRAME_LIMIT_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_hostile_length_is_refused_before_anything_is_allocated(length: int) -> None:
    reader = FrameReader()
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=f"announced a frame of {length} bytes"):
            reader.feed(struct.pack("<Q", length))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_length_is_judged_as_soon_as_it_is_complete() -> None:
    reader = FrameReader(limit_bytes=3)
    assert reader.feed(frame(b"abc")) == [b"abc"]
    assert reader.feed(frame(b"abcd")[:7]) == []
    with pytest.raises(WireError):
        reader.feed(frame(b"abcd")[7:8])


def test_the_longest_frame_passes_and_one_byte_more_is_not_even_sent() -> None:
    longest = b"x" * CONTROL_FRAME_LIMIT_BYTES
    assert FrameReader().feed(frame(longest)) == [longest]
    with pytest.raises(WireError, match=f"a message of {len(longest) + 1} bytes"):
        frame(longest + b"x")
