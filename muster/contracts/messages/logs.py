"""The messages with which a host sends the logs of its ranks: payloads of a sealed link.

The first one is a `muster.contracts.messages.agent.LogHello`. Then the coordinator tells what it
has. From there the sender goes on, in the order of offsets, whatever interrupted the
connection before.
"""

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from muster.contracts.messages.message import Message
from muster.contracts.rank import Count
from muster.contracts.settings.paths import LOG_EPOCH_BYTES

PART_BYTES: Final = (1 << 18) - 1024
"""Most data of one part."""

Kind: TypeAlias = Literal["log", "times", "exit"]
Rank = Annotated[int, Meta(ge=0, le=99_999)]  # as many as the names of files have digits for
Offset = Annotated[int, Meta(ge=0, le=LOG_EPOCH_BYTES - 1)]  # in the file itself


class LogPart(Message, frozen=True, tag="log_part"):
    """`data` goes to `start`, behind which the file ends. An exit record comes whole.

    A start before the coordinator's end begins anew: the program has truncated its log.
    """

    rank: Rank
    attempt: Count
    kind: Kind
    start: Offset
    data: Annotated[bytes, Meta(max_length=PART_BYTES)]
    begin: Offset = 0
    """Where the oldest bytes of the log begin that were not discarded."""


class BatchSent(Message, frozen=True, tag="log_batch"):
    """Asks for `BatchKept`."""


class LogsDrained(Message, frozen=True, tag="logs_drained"):
    """All logs are sent as they were when `DrainLogs` came."""


class LogsAtCoordinator(Message, frozen=True, tag="logs_at_coordinator"):
    """What the coordinator has: the size of each file that is not empty."""

    sizes: tuple[tuple[Rank, Count, Kind, Count], ...]
    is_last: bool  # no more of these messages follow


class BatchKept(Message, frozen=True, tag="log_batch_kept"):
    """Everything before `BatchSent` is in the coordinator's files."""


class DrainLogs(Message, frozen=True, tag="drain_logs"):
    """No rank of the host runs: tell when all logs are sent."""


SenderMessage: TypeAlias = LogPart | BatchSent | LogsDrained
ReceiverMessage: TypeAlias = LogsAtCoordinator | BatchKept | DrainLogs
