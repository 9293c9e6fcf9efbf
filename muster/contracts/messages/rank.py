"""The messages between a rank and its agent: closed unions of frozen, tagged values."""

from typing import Final, TypeAlias

import msgspec

from muster.contracts.agent import LOOPBACK
from muster.contracts.interpreter import PROTOCOL, VERSION
from muster.contracts.job.status import Reason
from muster.contracts.messages.message import Message
from muster.contracts.rank import Count, Phase, RankProgress
from muster.contracts.series import Window

NONCE_BYTES: Final = 16

METRICS_LIMIT: Final = 64
METRIC_NAME_LIMIT: Final = 128
"""Characters. All metrics of a step go into one heartbeat, which has to fit into one packet."""

SAVED_LIMIT: Final = 256
"""Most `Saved` messages kept to be repeated; each includes the epochs of those before it."""

ERROR_LIMIT: Final = 2000  # characters kept of an error that a program has written down


# Rank → agent


class Executing(Message, frozen=True, tag="executing"):
    """The launcher is about to exec the user's program, which may or may not send heartbeats."""


class Hello(Message, frozen=True, tag="hello"):
    """A program that uses `muster.Run` has joined; it sends heartbeats from now on."""

    version: str = VERSION  # of the program's Muster
    protocol: int = PROTOCOL
    python: str = ""  # its interpreter


class RankVersion(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="hello"):
    """What a `Hello` of any version says: the fields that it does not know are ignored."""

    version: str = ""
    protocol: int = 0  # before there were numbers
    python: str = ""


class Code(Message, frozen=True, tag="code"):
    """Digests of the user's code that a rank, or its agent before the start, has met, by path."""

    files: dict[str, str]


class Heartbeat(Message, frozen=True, omit_defaults=True, tag="heartbeat"):
    """The rank is alive. Sent at every interval, and earlier when there is news."""

    progress: RankProgress
    checkpoints_saved: Count  # durable checkpoints of this attempt
    stopping: bool  # the rank received SIGTERM: from now on exit code 0 means saved, not finished
    waiting: bool  # the rank waits for its peers, so a missing step is not its fault
    window: Window | None = None  # all values since the heartbeat before
    phase: Phase = Phase.TRAINING


class JoinedProcessEnded(Message, frozen=True, tag="joined_process_ended"):
    """The process that said hello has ended, and the script that started it goes on.

    Sent by the agent. The rank is then like a program that never sends heartbeats.
    """


class Warned(Message, frozen=True, tag="warned"):
    """A warning for the job's events; training continues."""

    message: str


class Orphaned(Message, frozen=True, tag="orphaned"):
    """The rank has lost its supervisor and was asked to save and exit.

    Sent by the rank, or by its agent for a program that sends nothing itself.
    """

    by: str  # sender and reason; "itself (no agent for 300 s)"


class PermanentFailure(Message, frozen=True, tag="permanent_failure", omit_defaults=True):
    """The rank is about to exit, and a restart would not help."""

    reason: Reason
    message: str
    is_of_data: bool = False  # on a host with the data of the job it would


class Raised(Message, frozen=True, tag="raised"):
    """The program raised an error in this step, and the rank is about to exit.

    A step is deterministic, so the same error at the same step will come again.
    """

    step: Count
    message: str
    key: str = ""
    """Equal for errors that count as the same one in any step."""


class RestoreFailed(Message, frozen=True, tag="restore_failed"):
    """The checkpoint from which the whole gang resumes is damaged in this rank's place."""

    restore_from: str
    message: str


class Ready(Message, frozen=True, tag="ready"):
    """A rank of a synchronous job has loaded its program and data, and waits for a group."""

    port: int  # the TCP port for its peers; 0 with shared memory


SPARE_READY: Final = Ready(port=-1)
"""A spare process has loaded its program and data, and waits for an order."""


class JoinedGroup(Message, frozen=True, tag="joined_group"):
    """The rank trains in this group round: it has the state that all members have."""

    round: Count
    step: Count


class LoopEnded(Message, frozen=True, tag="loop_ended"):
    """The loop of the program is over and the last checkpoint durable; its script goes on.

    Sent by programs whose ranks train one model and may do more after it, such as an export.
    """

    exporter: Count  # the one rank on whose script the job waits; equal on all ranks


class PeerLost(Message, frozen=True, omit_defaults=True, tag="peer_lost"):
    """The rank lost a peer, or never reached it, and waits for the next group round."""

    round: Count
    message: str
    unreachable: int | None = None  # the rank to which no connection came about


class StateMismatch(Message, frozen=True, omit_defaults=True, tag="state_mismatch"):
    """Some members of the group hold, or compute, other bits than the rest."""

    round: Count
    workers: tuple[int, ...]
    message: str
    entries: tuple[str, ...] = ()
    """The first parts of the state that differ, by name; none if something else does."""


class EpochDone(Message, frozen=True, tag="epoch_done"):
    """The samples consumed in one epoch, and the totals of the data set's index."""

    epoch: Count
    samples: Count
    hash_sum: int  # sums of the samples' hashes are modulo 2**64
    expected_samples: Count
    expected_hash_sum: int

    @property
    def exactly_once(self) -> bool | None:
        """Whether every sample was read exactly once; None while samples are missing."""
        if self.samples < self.expected_samples:
            return None
        return (self.samples, self.hash_sum) == (self.expected_samples, self.expected_hash_sum)


class Saved(Message, frozen=True, tag="saved"):
    """A coordinated checkpoint is durable: no step up to this one can be lost."""

    generation: Count
    step: Count
    epoch: Count
    digest: str  # of state and position, in hexadecimal digits
    consumed: Count
    consumed_hash: int
    epochs: tuple[EpochDone, ...]
    """Finished epochs that are durable with it, oldest first. Epochs that do not fit into one
    message follow in further messages of the same step."""


RankMessage: TypeAlias = (
    Executing
    | Hello
    | Code
    | Heartbeat
    | JoinedProcessEnded
    | Warned
    | Orphaned
    | PermanentFailure
    | Raised
    | RestoreFailed
    | Ready
    | JoinedGroup
    | LoopEnded
    | PeerLost
    | StateMismatch
    | Saved
)


# Agent → rank


class GroupMember(Message, frozen=True, omit_defaults=True, tag="group_member"):
    """One worker of a group. Its index in the group is its index in `WorkerGroup.members`."""

    worker_id: int
    rank: int
    host: str  # the coordinator's name for it
    port: int
    address: str = LOOPBACK  # where members on other hosts reach it


class WorkerGroup(Message, frozen=True, omit_defaults=True, tag="worker_group"):
    """The workers that train together from now on. A rank that is not a member exits.

    File descriptors of shared memory travel with it. If all members are on one host, first the
    memory that all members write results to, made for this round alone, then each member's own
    arena in the order of `members`. Else the recipient's own arena alone.
    """

    round: int  # counts up with every change of the group
    token: str  # members prove with it that they belong to the group
    members: tuple[GroupMember, ...]
    paused: bool  # no step is taken until the next round
    save: bool = False  # a checkpoint was requested: save the present step before the next one
    exporter: int | None = None  # the rank that exports, if the loop has ended in an earlier round
