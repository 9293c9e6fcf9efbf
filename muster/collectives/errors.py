"""Errors of communication between ranks.

CollectiveError
├── InvalidWorldSize      a group cannot have that size
├── InvalidRank           no such rank in the group
├── SelfMessage           a rank cannot send to itself
├── NotConnected          there is no connection to that rank
├── SizeMismatch          the message does not have the size that the receiver expects
├── TimedOut              nothing arrived in time; the backend stays usable
├── ChannelClosed         the other end is gone, or this one was closed
├── TransportFailed       the operating system reported an error
├── PeerRefused           wrong token or generation, or invalid data
├── BackendUnavailable    this machine does not support the backend
└── Unsupported           the backend does not support the operation
"""

from muster.contracts.errors import MusterError


class CollectiveError(MusterError):
    """Base of all errors between ranks."""


class InvalidWorldSize(CollectiveError):
    def __init__(self, world_size: int, least: int) -> None:
        super().__init__(f"a world size of {world_size} is too small: give at least {least}")
        self.world_size = world_size


class InvalidRank(CollectiveError):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(f"there is no rank {rank}: name one from 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size


class SelfMessage(CollectiveError):
    def __init__(self, rank: int) -> None:
        super().__init__(
            f"rank {rank} cannot send to itself or receive from itself: name another one"
        )
        self.rank = rank


class NotConnected(CollectiveError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"there is no connection to rank {rank}: create a new group")
        self.rank = rank


class SizeMismatch(CollectiveError):
    def __init__(self, expected_bytes: int, got_bytes: int) -> None:
        super().__init__(
            f"expected a message of {expected_bytes} bytes, got {got_bytes}: "
            "use the same size on both ends"
        )
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes


class TimedOut(CollectiveError):
    def __init__(self, seconds: float, waited_for: str) -> None:
        super().__init__(
            f"{waited_for} did not arrive within {seconds:g} s: "
            "check the other ranks, or set a longer timeout"
        )
        self.seconds = seconds


class ChannelClosed(CollectiveError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"the channel to rank {rank} is closed: if it has ended, its log says why")
        self.rank = rank


class TransportFailed(CollectiveError):
    """`__cause__` is the operating system's error."""


class PeerRefused(CollectiveError):
    """The other end is not a member of the group, or no longer one."""


class BackendUnavailable(CollectiveError):
    """Says what is missing."""


class Unsupported(CollectiveError):
    """Says which operation."""
