import struct
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from muster.contracts import messages
from muster.contracts.errors import WireError
from muster.contracts.job import Reason
from muster.contracts.messages import (
    METRIC_NAME_LIMIT,
    METRICS_LIMIT,
    AgentHeartbeat,
    AgentHello,
    AnnounceGroup,
    Dismiss,
    EpochDone,
    Executing,
    GroupMember,
    Heartbeat,
    Hello,
    JoinedGroup,
    KillRank,
    Orphaned,
    PeerLost,
    PermanentFailure,
    Raised,
    RankExited,
    RankSaid,
    RankSpawned,
    Ready,
    Saved,
    StartRank,
    StateMismatch,
    TerminateRank,
    Warned,
    Welcome,
    WorkerGroup,
)
from muster.contracts.rank import NO_PROGRESS, RankProgress
from muster.contracts.wire import (
    CONTROL_FRAME_LIMIT_BYTES,
    FrameReader,
    decode_agent_message,
    decode_coordinator_message,
    decode_group,
    decode_rank_message,
    encode,
    frame,
)
from worker.rank import MESSAGE_LIMIT_BYTES

Decode = Callable[[bytes], msgspec.Struct]

FIRST = Heartbeat(
    progress=NO_PROGRESS,
    checkpoints_saved=0,
    stopping=False,
    waiting=False,
)
LATER = Heartbeat(
    progress=RankProgress(
        step=2**40,
        total_steps=2**41,
        epoch=3,
        shard_idx=5,
        line_idx=2**33,
        loss=0.1,
        metrics={"accuracy": 0.9, "größe": -1e300},
        last_checkpoint_step=2**40 - 1,
    ),
    checkpoints_saved=7,
    stopping=True,
    waiting=True,
)

FROM_RANKS = [
    Executing(),
    Hello(),
    FIRST,
    LATER,
    Warned(message="careful: ü"),
    Orphaned(by="itself (no agent for 300 s)"),
    PermanentFailure(reason=Reason.INVALID_PROGRAM, message="no"),
    Raised(step=7, message="gradient() failed"),
    Ready(port=4711),
    JoinedGroup(generation=3, step=12),
    PeerLost(generation=3, message="the channel to rank 1 is closed"),
    StateMismatch(generation=3, workers=(4,), message="differs"),
    Saved(
        generation=3,
        step=12,
        epoch=1,
        digest="d" * 32,
        consumed=64,
        consumed_hash=2**64 - 1,
        epochs=(
            EpochDone(
                epoch=0,
                samples=100,
                hash_sum=2**64 - 1,
                expected_samples=100,
                expected_hash_sum=2**64 - 1,
            ),
        ),
    ),
]
FROM_AGENTS = [
    AgentHello(job_uid="uid", generation=1, token="secret"),  # noqa: S106  for a test
    RankSpawned(rank=1, incarnation=2, pid=3, start_ticks=2**50, boot_id="boot", node="node"),
    *(RankSaid(rank=1, incarnation=2, message=message) for message in FROM_RANKS),
    RankExited(rank=1, incarnation=2, exit_code=0, signal=None, last_lines=()),
    RankExited(rank=1, incarnation=2, exit_code=None, signal=9, last_lines=("a", "b")),
    RankExited(rank=1, incarnation=2, exit_code=None, signal=9, last_lines=(), out_of_memory=True),
    RankExited(
        rank=1, incarnation=2, exit_code=None, signal=None, last_lines=(), unstarted="cannot be"
    ),
    AgentHeartbeat(stopped=()),
    AgentHeartbeat(stopped=((0, 0), (3, 7))),
]
GROUP = WorkerGroup(
    generation=3,
    token="secret",  # noqa: S106  for a test
    members=(GroupMember(worker_id=4, rank=1, host="127.0.0.1", port=4711),),
    paused=False,
)
FROM_COORDINATORS = [
    Welcome(epoch=4),
    StartRank(rank=1, incarnation=2, environment={"A": "ü"}, working_dir="/"),
    TerminateRank(rank=1, incarnation=2),
    KillRank(rank=1, incarnation=2),
    AnnounceGroup(layout=GROUP, incarnations=(2,)),
    Dismiss(),
]

DIRECTIONS = [
    (decode_rank_message, FROM_RANKS),
    (decode_agent_message, FROM_AGENTS),
    (decode_coordinator_message, FROM_COORDINATORS),
    (decode_group, [GROUP]),
]
EVERYTHING = [(decode, message) for decode, sent in DIRECTIONS for message in sent]
DECODERS = [decode for decode, _ in DIRECTIONS]


def test_every_message_type_is_tested() -> None:
    tagged = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        if kind.__struct_config__.tag not in (None, "_Message")
    }
    tried = {type(message) for _, message in EVERYTHING}
    assert tagged - tried == {EpochDone, GroupMember}, "parts of other messages"


ON_THE_WIRE = [
    (
        FIRST,
        (
            '{"is":"beat","progress":{"step":0,"total_steps":null,"epoch":0,"shard_idx":0,'
            '"line_idx":0,"loss":null,"metrics":{},"last_checkpoint_step":null},'
            '"checkpoints_saved":0,"stopping":false,"waiting":false}'
        ),
    ),
    (
        PermanentFailure(reason=Reason.INVALID_PROGRAM, message="m"),
        '{"is":"refused","reason":"invalid_program","message":"m"}',
    ),
    (JoinedGroup(generation=3, step=12), '{"is":"took_up","generation":3,"step":12}'),
    (PeerLost(generation=3, message="m"), '{"is":"stranded","generation":3,"message":"m"}'),
    (
        StateMismatch(generation=3, workers=(4,), message="m"),
        '{"is":"disputed","generation":3,"workers":[4],"message":"m"}',
    ),
    (AgentHeartbeat(stopped=((3, 7),)), '{"is":"pulse","stopped":[[3,7]]}'),
    (
        AnnounceGroup(layout=GROUP, incarnations=(2,)),
        (
            '{"is":"announce","layout":{"is":"layout","generation":3,"token":"secret","seats":'
            '[{"is":"seat","worker_id":4,"rank":1,"host":"127.0.0.1","port":4711}],"paused":false},'
            '"incarnations":[2]}'
        ),
    ),
]


@pytest.mark.parametrize(("message", "text"), ON_THE_WIRE)
def test_tags_and_field_names_never_change(message: msgspec.Struct, text: str) -> None:
    assert encode(message) == msgspec.msgpack.encode(msgspec.json.decode(text))


@pytest.mark.parametrize(("decode", "message"), EVERYTHING)
def test_messages_round_trip(decode: Decode, message: msgspec.Struct) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(("decode", "message"), EVERYTHING)
def test_truncated_message_is_a_wire_error(decode: Decode, message: msgspec.Struct) -> None:
    payload = encode(message)
    for length in range(len(payload)):
        with pytest.raises(WireError):
            decode(payload[:length])


@pytest.mark.parametrize(("decode", "message"), EVERYTHING)
def test_changed_byte_raises_nothing_but_wire_error(
    decode: Decode, message: msgspec.Struct
) -> None:
    payload = encode(message)
    for place in range(len(payload)):
        for byte in (0x00, 0x7F, 0x80, 0xC1, 0xFF, payload[place] ^ 1, payload[place] ^ 0x80):
            try:
                decode(payload[:place] + bytes([byte]) + payload[place + 1 :])
            except WireError:
                continue


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\xc1",
        b"GET / HTTP/1.1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"is": "unknown"}),
        msgspec.msgpack.encode({"is": 3}),
        msgspec.msgpack.encode({"is": "hello", "more": 1}),
        msgspec.msgpack.encode({"is": "welcome", "epoch": "4"}),
        msgspec.msgpack.encode({"is": "welcome", "epoch": None}),
        msgspec.msgpack.encode({"is": "welcome"}),
        msgspec.msgpack.encode({"is": "rank_exited", "rank": 1.5}),
        encode(Hello()) * 2,
        # Invalid UTF-8 and endless nesting raise errors of their own in the decoder.
        b"\x82\xa2is\xa6warned\xa7message\xa1\xff",
        b"\x82\xa2is\xa9rank_said\xa7message\x82\xa2is\xa6warned\xa7message\xa1\xff",
        b"\x81" + b"\x91" * 100_000,
        b"\x82\xa4more" + b"\x91" * 100_000,
    ],
)
def test_garbage_is_a_wire_error(decode: Decode, payload: bytes) -> None:
    with pytest.raises(WireError, match="sent an invalid message"):
        decode(payload)


@pytest.mark.parametrize(("decode", "sent"), DIRECTIONS)
def test_message_of_another_direction_is_a_wire_error(
    decode: Decode, sent: list[msgspec.Struct]
) -> None:
    for _, message in EVERYTHING:
        if message not in sent:
            with pytest.raises(WireError):
                decode(encode(message))


@pytest.mark.parametrize("step", [-1, 2**63])
def test_count_beyond_64_bits_is_a_wire_error(step: int) -> None:
    content = msgspec.msgpack.encode(msgspec.to_builtins(FIRST) | {"step": step})
    with pytest.raises(WireError):
        decode_rank_message(content)


def test_largest_heartbeat_fits_into_one_packet() -> None:
    names = [f"{number:03d}".ljust(METRIC_NAME_LIMIT, "😀") for number in range(METRICS_LIMIT)]
    metrics = dict.fromkeys(names, -1e300)
    beat = msgspec.structs.replace(
        LATER, progress=msgspec.structs.replace(LATER.progress, metrics=metrics)
    )
    assert len(encode(beat)) <= MESSAGE_LIMIT_BYTES


PAYLOADS = [b"", b"a", b"\x00" * 9, b"hello" * 5, b""]
STREAM = b"".join(map(frame, PAYLOADS))


def test_frame_layout() -> None:
    assert frame(b"abc") == b"\x03\0\0\0\0\0\0\0abc"


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_frames_split_anywhere_are_reassembled(cut: int) -> None:
    reader = FrameReader()
    assert reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:]) == PAYLOADS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000])
def test_frames_in_pieces_are_reassembled(size: int) -> None:
    reader = FrameReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [payload for piece in pieces for payload in reader.feed(piece)] == PAYLOADS


def test_incomplete_frame_is_kept() -> None:
    reader = FrameReader()
    assert reader.feed(frame(b"abc")[:-1]) == []
    assert reader.feed(b"") == []
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
