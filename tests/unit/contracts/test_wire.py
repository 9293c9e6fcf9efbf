"""Messages as bytes; every message is generated from its declaration."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from muster.contracts.errors import WireError
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import (
    AgentHeartbeat,
    AgentMessage,
    AnnounceGroup,
    CoordinatorMessage,
)
from muster.contracts.messages.logs import ReceiverMessage, SenderMessage
from muster.contracts.messages.rank import (
    METRIC_NAME_LIMIT,
    METRICS_LIMIT,
    GroupMember,
    Heartbeat,
    Hello,
    JoinedGroup,
    PeerLost,
    PermanentFailure,
    RankMessage,
    StateMismatch,
    WorkerGroup,
)
from muster.contracts.messages.storage import StorageReply, StorageRequest
from muster.contracts.messages.wire import (
    decode_agent_message,
    decode_coordinator_message,
    decode_group,
    decode_rank_message,
    decode_receiver_message,
    decode_sender_message,
    decode_storage_reply,
    decode_storage_request,
    encode,
)
from muster.contracts.rank import COUNT_MAX, NO_PROGRESS
from muster.contracts.series import Aggregate, Window
from worker.ranks.rank import MESSAGE_LIMIT_BYTES

Decode = Callable[[bytes], msgspec.Struct]


SIMPLE: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.NoneType: st.none(),
    inspect.BoolType: st.booleans(),
    inspect.StrType: st.text(max_size=128),
    inspect.BytesType: st.binary(max_size=128),
    inspect.FloatType: st.floats(allow_nan=False),
    inspect.DateTimeType: st.datetimes(timezones=st.just(UTC)),
}


def values(  # noqa: PLR0911  one return for each kind
    declared: inspect.Type,
) -> st.SearchStrategy[Any]:
    """Return a strategy for what a declaration allows."""
    if isinstance(declared, inspect.Metadata):
        declared = declared.type
    match declared:
        case inspect.IntType(ge=low, le=high):
            lowest = -(2**63) if low is None else int(low)
            return st.integers(lowest, 2**64 - 1 if high is None else int(high))
        case inspect.UnionType(types=kinds):
            return st.one_of(*map(values, kinds))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case inspect.EnumType(cls=kind):
            return st.sampled_from(kind)
        case inspect.StructType(cls=kind, fields=fields):
            return st.builds(kind, **{field.name: values(field.type) for field in fields})
    return SIMPLE[type(declared)]


SENT = {
    decode_rank_message: values(inspect.type_info(RankMessage)),
    decode_agent_message: values(inspect.type_info(AgentMessage)),
    decode_coordinator_message: values(inspect.type_info(CoordinatorMessage)),
    decode_group: values(inspect.type_info(WorkerGroup)),
    decode_storage_request: values(inspect.type_info(StorageRequest)),
    decode_storage_reply: values(inspect.type_info(StorageReply)),
    decode_sender_message: values(inspect.type_info(SenderMessage)),
    decode_receiver_message: values(inspect.type_info(ReceiverMessage)),
}
DECODERS = list(SENT)


@pytest.mark.slow
@pytest.mark.parametrize("decode", DECODERS)
@settings(max_examples=25)
@given(data=st.data())
def test_messages_round_trip_and_damage_is_a_wire_error(
    decode: Decode, data: st.DataObject
) -> None:
    message = data.draw(SENT[decode])
    payload = encode(message)
    assert decode(payload) == message
    for other in DECODERS:
        if other is not decode:
            with pytest.raises(WireError):
                other(payload)
    place = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(WireError):
        decode(payload[:place])
    changed = bytearray(payload)
    changed[place] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        decode(bytes(changed))


FIRST = Heartbeat(
    progress=NO_PROGRESS,
    checkpoints_saved=0,
    stopping=False,
    waiting=False,
)
GROUP = WorkerGroup(
    round=3,
    token="secret",  # noqa: S106  for a test
    members=(GroupMember(worker_id=4, rank=1, host="127.0.0.1", port=4711),),
    paused=False,
)
ON_THE_WIRE = [
    (
        FIRST,
        (
            '{"is":"heartbeat","progress":{"step":0,"total_steps":null,"epoch":0,"shard_idx":0,'
            '"line_idx":0,"loss":null,"metrics":{},"last_checkpoint_step":null,'
            '"last_checkpoint_bytes":null,"last_checkpoint_at":null,"metric_steps":{},'
            '"is_unchecked":false},"checkpoints_saved":0,"stopping":false,"waiting":false}'
        ),
    ),
    (
        PermanentFailure(reason=Reason.INVALID_PROGRAM, message="m"),
        '{"is":"permanent_failure","reason":"invalid_program","message":"m"}',
    ),
    (
        PermanentFailure(reason=Reason.INVALID_DATASET, message="m", is_of_data=True),
        '{"is":"permanent_failure","reason":"invalid_dataset","message":"m","is_of_data":true}',
    ),
    (JoinedGroup(round=3, step=12), '{"is":"joined_group","round":3,"step":12}'),
    (PeerLost(round=3, message="m"), '{"is":"peer_lost","round":3,"message":"m"}'),
    (
        StateMismatch(round=3, workers=(4,), message="m"),
        '{"is":"state_mismatch","round":3,"workers":[4],"message":"m"}',
    ),
    (
        StateMismatch(round=3, workers=(4,), message="m", entries=("weights",)),
        '{"is":"state_mismatch","round":3,"workers":[4],"message":"m","entries":["weights"]}',
    ),
    (AgentHeartbeat(stopped=((3, 7),)), '{"is":"agent_heartbeat","stopped":[[3,7]]}'),
    (
        AgentHeartbeat(stopped=(), late_seconds=0.5, starved=((3, 7, 1.5),)),
        '{"is":"agent_heartbeat","stopped":[],"late_seconds":0.5,"starved":[[3,7,1.5]]}',
    ),
    (
        AnnounceGroup(group=GROUP, attempts=(2,)),
        (
            '{"is":"announce_group","group":{"is":"worker_group","round":3,"token":"secret",'
            '"members":[{"is":"group_member","worker_id":4,"rank":1,"host":"127.0.0.1","port":4711}],"paused":false},'
            '"attempts":[2]}'
        ),
    ),
]


@pytest.mark.parametrize(("message", "text"), ON_THE_WIRE)
def test_tags_and_field_names_never_change(message: msgspec.Struct, text: str) -> None:
    assert encode(message) == msgspec.msgpack.encode(msgspec.json.decode(text))


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


@pytest.mark.parametrize("step", [-1, 2**63])
def test_count_beyond_64_bits_is_a_wire_error(step: int) -> None:
    content = msgspec.msgpack.encode(msgspec.to_builtins(FIRST) | {"step": step})
    with pytest.raises(WireError):
        decode_rank_message(content)


def test_largest_heartbeat_fits_into_one_packet() -> None:
    names = [f"{number:03d}".ljust(METRIC_NAME_LIMIT, "😀") for number in range(METRICS_LIMIT)]
    progress = msgspec.structs.replace(
        NO_PROGRESS,
        metrics=dict.fromkeys(names, -1e300),
        metric_steps=dict.fromkeys(names, COUNT_MAX),
    )
    values = dict.fromkeys(names, Aggregate(*[-1e300] * 4, COUNT_MAX, COUNT_MAX))
    window = Window(COUNT_MAX, COUNT_MAX, is_back=True, values=values)
    beat = msgspec.structs.replace(FIRST, progress=progress, window=window)
    assert len(encode(beat)) <= MESSAGE_LIMIT_BYTES
