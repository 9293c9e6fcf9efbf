from collections.abc import Callable

import msgspec
import pytest

from muster.contracts import messages
from muster.contracts.encoding import (
    decode_agent_message,
    decode_coordinator_message,
    decode_layout,
    decode_rank_message,
    encode,
)
from muster.contracts.errors import WireError
from muster.contracts.job import Reason
from muster.contracts.messages import (
    METRIC_NAME_LIMIT,
    METRICS_LIMIT,
    AgentHello,
    Announce,
    Beat,
    Dismiss,
    Disputed,
    EpochDone,
    Executing,
    Hello,
    KillRank,
    Layout,
    Orphaned,
    Pulse,
    Raised,
    RankExited,
    RankSaid,
    RankSpawned,
    Ready,
    Refused,
    Saved,
    Seat,
    StartRank,
    Stranded,
    TerminateRank,
    TookUp,
    Warned,
    Welcome,
)
from worker.child import MESSAGE_LIMIT_BYTES

Decode = Callable[[bytes], msgspec.Struct]

FIRST_BEAT = Beat(
    step=0,
    total_steps=None,
    epoch=0,
    shard_idx=0,
    line_idx=0,
    loss=None,
    metrics={},
    checkpoints_saved=0,
    last_checkpoint_step=None,
    stopping=False,
    waiting=False,
)
LATER_BEAT = Beat(
    step=2**40,
    total_steps=2**41,
    epoch=3,
    shard_idx=5,
    line_idx=2**33,
    loss=0.1,
    metrics={"accuracy": 0.9, "größe": -1e300},
    checkpoints_saved=7,
    last_checkpoint_step=2**40 - 1,
    stopping=True,
    waiting=True,
)

FROM_RANKS = [
    Executing(),
    Hello(),
    FIRST_BEAT,
    LATER_BEAT,
    Warned(message="careful: ü"),
    Orphaned(by="itself (no agent for 300 s)"),
    Refused(reason=Reason.INVALID_PROGRAM, message="no"),
    Raised(step=7, message="gradient() failed"),
    Ready(port=4711),
    TookUp(generation=3, step=12),
    Stranded(generation=3, message="the channel to rank 1 is closed"),
    Disputed(generation=3, workers=(4,), message="differs"),
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
    Pulse(stopped=()),
    Pulse(stopped=((0, 0), (3, 7))),
]
LAYOUT = Layout(
    generation=3,
    token="secret",  # noqa: S106  for a test
    seats=(Seat(worker_id=4, rank=1, host="127.0.0.1", port=4711),),
    paused=False,
)
FROM_COORDINATORS = [
    Welcome(epoch=4),
    StartRank(rank=1, incarnation=2, environment={"A": "ü"}, working_dir="/"),
    TerminateRank(rank=1, incarnation=2),
    KillRank(rank=1, incarnation=2),
    Announce(layout=LAYOUT, incarnations=(2,)),
    Dismiss(),
]

DIRECTIONS = [
    (decode_rank_message, FROM_RANKS),
    (decode_agent_message, FROM_AGENTS),
    (decode_coordinator_message, FROM_COORDINATORS),
    (decode_layout, [LAYOUT]),
]
EVERYTHING = [(decode, message) for decode, spoken in DIRECTIONS for message in spoken]
DECODERS = [decode for decode, _ in DIRECTIONS]


def test_every_kind_of_message_is_tried_here() -> None:
    kinds = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    tried = {type(message) for _, message in EVERYTHING}
    # Parts of other messages, and what all have in common.
    assert {kind.__name__ for kind in kinds - tried} == {"_Message", "EpochDone", "Seat"}


@pytest.mark.parametrize(("decode", "message"), EVERYTHING)
def test_what_is_said_is_what_is_heard(decode: Decode, message: msgspec.Struct) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(("decode", "message"), EVERYTHING)
def test_a_message_that_is_cut_short_is_none(decode: Decode, message: msgspec.Struct) -> None:
    payload = encode(message)
    for length in range(len(payload)):
        with pytest.raises(WireError):
            decode(payload[:length])


@pytest.mark.parametrize(("decode", "message"), EVERYTHING)
def test_a_byte_gone_wrong_is_an_error_of_ours_or_another_message(
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
        msgspec.msgpack.encode({"is": "unheard_of"}),
        msgspec.msgpack.encode({"is": 3}),
        msgspec.msgpack.encode({"is": "hello", "more": 1}),
        msgspec.msgpack.encode({"is": "welcome", "epoch": "4"}),
        msgspec.msgpack.encode({"is": "welcome", "epoch": None}),
        msgspec.msgpack.encode({"is": "welcome"}),
        msgspec.msgpack.encode({"is": "rank_exited", "rank": 1.5}),
        encode(Hello()) * 2,
        # A text that is none, and nests without end: both once went past our own error.
        b"\x82\xa2is\xa6warned\xa7message\xa1\xff",
        b"\x82\xa2is\xa9rank_said\xa7message\x82\xa2is\xa6warned\xa7message\xa1\xff",
        b"\x81" + b"\x91" * 100_000,
        b"\x82\xa4more" + b"\x91" * 100_000,
    ],
)
def test_garbage_is_an_error_of_ours(decode: Decode, payload: bytes) -> None:
    with pytest.raises(WireError, match="sent what is no message"):
        decode(payload)


@pytest.mark.parametrize(("decode", "spoken"), DIRECTIONS)
def test_nobody_is_heard_with_the_words_of_another(
    decode: Decode, spoken: list[msgspec.Struct]
) -> None:
    for _, message in EVERYTHING:
        if message not in spoken:
            with pytest.raises(WireError):
                decode(encode(message))


@pytest.mark.parametrize("step", [-1, 2**63])
def test_a_count_that_no_database_holds_is_no_message(step: int) -> None:
    """One rank must not be able to end a coordinator, which holds the jobs of everybody."""
    content = msgspec.msgpack.encode(msgspec.to_builtins(FIRST_BEAT) | {"step": step})
    with pytest.raises(WireError):
        decode_rank_message(content)


def test_as_many_metrics_as_are_allowed_fit_into_one_packet() -> None:
    names = [f"{number:03d}".ljust(METRIC_NAME_LIMIT, "😀") for number in range(METRICS_LIMIT)]
    beat = msgspec.structs.replace(LATER_BEAT, metrics=dict.fromkeys(names, -1e300))
    assert len(encode(beat)) <= MESSAGE_LIMIT_BYTES
