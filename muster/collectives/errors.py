"""What can go wrong between ranks.

CollectiveError
├── InvalidWorldSize      a group of that size cannot be
├── InvalidRank           no such rank in the group
├── SelfMessage           a rank has nothing to send to itself
├── NotConnected          there is no connection to that rank
├── SizeMismatch          the message is of another size than the receiver said
├── TimedOut              nothing came within the time; the backend stays usable
├── ChannelClosed         the other end is gone, or this one was closed
├── TransportFailed       the operating system reported an error
├── PeerRefused           the other end is not who it has to be: token, generation or garbage
├── BackendUnavailable    this machine cannot do it
└── Unsupported           this backend cannot do it
"""

from muster.contracts.errors import MusterError


class CollectiveError(MusterError):
    """Base of everything that is raised between ranks."""


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
        super().__init__(f"there is no connection to rank {rank}: let all ranks meet again")
        self.rank = rank


class SizeMismatch(CollectiveError):
    def __init__(self, expected_bytes: int, got_bytes: int) -> None:
        super().__init__(
            f"expected a message of {expected_bytes} bytes, got {got_bytes}: "
            "let both ends name the same size"
        )
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes


class TimedOut(CollectiveError):
    def __init__(self, seconds: float, waited_for: str) -> None:
        super().__init__(
            f"{waited_for} did not come within {seconds:g} s: "
            "look at what the others do, or wait longer"
        )
        self.seconds = seconds


class ChannelClosed(CollectiveError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"the channel to rank {rank} is closed: its log says why, if it has ended")
        self.rank = rank


class TransportFailed(CollectiveError):
    """`__cause__` is the operating system's error."""


class PeerRefused(CollectiveError):
    """Somebody connected who is not, or not any more, one of the group."""


class BackendUnavailable(CollectiveError):
    """Says what is missing."""


class Unsupported(CollectiveError):
    """Says which operation."""
