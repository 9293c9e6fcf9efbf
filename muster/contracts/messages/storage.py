"""The messages between a rank and the storage process of its job: packets on a Unix socket.

Every request but `OpenCheckpoints` has one reply, after any number of `StorageWarned`. What is
large travels as a descriptor of anonymous memory, so that a save can be finished without its rank.

Where a host does not share the directory of checkpoints, its storage process calls a store on the
coordinator's host: `StoreCall` and `StoreAnswer` are sealed frames, each followed by its bytes.
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from muster.contracts.job.field_types import StepChoice
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.message import Message
from muster.contracts.rank import Count
from muster.contracts.shards import Position, Reading

PACKET_LIMIT_BYTES: Final = 1 << 16
SENTENCE_LIMIT: Final = 8192  # characters

Sentence = Annotated[str, Meta(max_length=SENTENCE_LIMIT)]
Name = Annotated[str, Meta(max_length=128)]
LocationText = Annotated[str, Meta(max_length=8192)]  # see `location.parse_location`


class OpenCheckpoints(Message, frozen=True, tag="open_checkpoints"):
    """The checkpoints that the following requests are about, and the process that uses them."""

    location: LocationText
    inherited: LocationText | None
    """Where the job named by `resume_from` has its checkpoints."""
    job_id: Name
    job_uid: Name | None
    rank: Count
    world_size: Count
    generation: Count | None
    keep_last: Annotated[int, Meta(ge=1)]
    any_world_size: bool = False  # True accepts checkpoints of every world size
    restore_from: Name | None = None  # that of the rank's settings
    inherited_step: StepChoice | None = None  # which one of `inherited`; None: the newest


class Claim(Message, frozen=True, tag="claim"):
    """Fence older generations."""


class FindBest(Message, frozen=True, tag="find_best"):
    """Return the metric of the job's best checkpoint as JSON; null without one."""


class Restore(Message, frozen=True, tag="restore"):
    """Return arrays and manifest of the newest checkpoint to begin with; nothing without one."""


class Witness(Message, frozen=True, tag="witness"):
    """Write the JSON in its memory beside the newest checkpoint."""

    json_bytes: Count


class ReadWitness(Message, frozen=True, tag="read_witness"):
    """Return what was written there; nothing if it is not whole."""


class ListGang(Message, frozen=True, tag="list_gang"):
    """Return the `RankCheckpoints` of each rank of a gang, once saves under way are over.

    Of an agent, without `OpenCheckpoints`. See `muster.checkpoints.listing.gang_checkpoints`.
    """

    location: LocationText
    ranks: Count
    job_uid: Name | None
    is_inherited: bool


class Save(Message, frozen=True, tag="save"):
    """Make the arrays and the values in its memory durable, as the checkpoint of a step."""

    step: Count
    position: Position
    state_bytes: Count
    json_bytes: Count


class ListShards(Message, frozen=True, tag="list_shards"):
    """Return the `Listing` of a data set."""

    location: LocationText


class FetchShard(Message, frozen=True, tag="fetch_shard"):
    """Return the path of a shard's file, see `DataSource.path`."""

    location: LocationText
    digest: Name  # of the listing that `shard_idx` is about: a new process lists again
    shard_idx: Count
    reading: Reading | None


class CountShards(Message, frozen=True, tag="count_shards"):
    """Return the totals of a range of shards."""

    location: LocationText
    digest: Name  # as above
    shard_idxs: tuple[Count, Count, Count]


WitnessRequest: TypeAlias = Witness | ReadWitness
DataRequest: TypeAlias = ListShards | FetchShard | CountShards
StorageRequest: TypeAlias = (
    OpenCheckpoints | Claim | FindBest | Restore | ListGang | Save | WitnessRequest | DataRequest
)


class Done(Message, frozen=True, tag="done"):
    """The request was carried out. Its memory, if any, holds a file of arrays and then JSON."""

    state_bytes: Count = 0
    json_bytes: Count = 0


class StorageFailed(Message, frozen=True, tag="storage_failed"):
    """The request failed with an error of this class."""

    error: Name
    message: Sentence


class StorageWarned(Message, frozen=True, tag="storage_warned"):
    """A sentence for the user; the request goes on."""

    message: Sentence


StorageReply: TypeAlias = Done | StorageFailed | StorageWarned


_Lists: TypeAlias = Literal["latest", "names", "by_trust", "ranks"]
StoreMethod: TypeAlias = Literal[
    _Lists, "read", "claim", "commit", "put_witness", "rewind", "remove", "close"
]

CHUNK_BYTES: Final = 1 << 19
"""Most bytes of a frame behind a call or an answer."""


class StoreCall(Message, frozen=True, tag="store_call"):
    """Call a method of the `CheckpointStore` in a directory of the coordinator's host."""

    location: LocationText
    method: StoreMethod
    name: Name = ""  # of a checkpoint
    file: Name = ""
    limit_bytes: Count = 0
    generation: Count | None = None
    job_uid: Name | None = None
    manifest_bytes: Count = 0  # of a commit, followed by its arrays; or of a witness
    state_bytes: Count = 0


class StoreAnswer(Message, frozen=True, tag="store_answer"):
    """What the method has returned; bytes of that length follow."""

    names: tuple[Name, ...] = ()  # of checkpoints
    numbers: tuple[int, ...] = ()
    size_bytes: Count = 0


class StorageAssignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a storage process reads as a line from its standard input."""

    socket: str  # its path; empty if it has only logs to send
    stop_grace_seconds: float
    keys: dict[str, str]  # of the store: environment variables of this process alone
    agent: AgentAssignment | None = None
    """Of another host than the coordinator's: logs are sent there, and perhaps checkpoints."""
