"""Errors of communication between ranks. Each has the facts of its message as fields.

CollectiveError
├── InvalidWorldSize      an invalid number of ranks
├── InvalidRank           the group has no such rank
├── SelfMessage           a rank sends to itself or receives from itself
├── NoConnection          this backend does not reach that rank
├── SizeMismatch          a message does not have the size that the receiver expects
├── CallMismatch          ranks called different operations, or with other options
├── Unsupported           this backend or operation cannot do that, or has no such route
├── Timeout               nothing arrived in time; the backend stays usable
├── PeerUnreachable       no connection to a rank comes about
├── Aborted               another rank left the operation, with the reason
├── ChannelClosed         the other end is gone, or this one was closed
│   └── PeerGone          muster/mesh/group.py
├── TransportFailed       the operating system reported an error
├── PeerRefused           wrong token or generation, or invalid data
└── BackendUnavailable    this machine does not support the backend
"""

from muster.contracts.errors import MusterError


class CollectiveError(MusterError):
    """Base of all errors between ranks."""


class InvalidWorldSize(CollectiveError):
    def __init__(self, world_size: int, least: int = 1) -> None:
        super().__init__(
            f"a group cannot have {world_size} ranks: this backend needs at least {least}"
        )
        self.world_size = world_size


class InvalidRank(CollectiveError):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(
            f"the group has no rank {rank}: its {world_size} ranks are numbered from 0"
        )
        self.rank = rank
        self.world_size = world_size


class SelfMessage(CollectiveError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} cannot send to itself: use the data where it is")
        self.rank = rank


class NoConnection(CollectiveError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"there is no connection to rank {rank}: check that all ranks have met")
        self.rank = rank


class SizeMismatch(CollectiveError):
    """Sizes in bytes; `rank` is the peer that sent the message, or None for own memory."""

    def __init__(self, expected: int, got: int, rank: int | None = None) -> None:
        source = "" if rank is None else f" from rank {rank}"
        super().__init__(
            f"expected a message of {expected} bytes{source}, got {got}: "
            "use the same size on both ends"
        )
        self.rank = rank
        self.expected = expected
        self.got = got


class CallMismatch(CollectiveError):
    def __init__(self, rank: int, expected: str, got: str) -> None:
        super().__init__(
            f"rank {rank} called {got}, this rank {expected}: "
            "call the same operations in the same order on all ranks"
        )
        self.rank = rank
        self.expected = expected
        self.got = got


class Unsupported(CollectiveError):
    """The message says what to use instead."""


class Timeout(CollectiveError):
    def __init__(
        self,
        seconds: float,
        waited_for: str,
        cure: str = "check the other ranks, or set a longer timeout",
    ) -> None:
        super().__init__(f"waited {seconds:g} s for {waited_for}: {cure}")
        self.seconds = seconds
        self.waited_for = waited_for


class PeerUnreachable(CollectiveError):
    def __init__(self, rank: int, place: str, reason: str) -> None:
        super().__init__(
            f"rank {rank} cannot be reached at {place} ({reason}): check that its host is up and "
            "that no firewall blocks the port"
        )
        self.rank = rank
        self.reason = reason


class Aborted(CollectiveError):
    def __init__(self, rank: int, reason: str) -> None:
        # The reason is an error's text that was written for that rank.
        reason = reason.replace("this rank", f"rank {rank}")
        super().__init__(f"rank {rank} left the operation: {reason}")
        self.rank = rank
        self.reason = reason


class ChannelClosed(CollectiveError):
    def __init__(self, rank: int, *, is_own: bool = False) -> None:
        super().__init__(
            f"the backend of rank {rank} is closed, or of the parent of this process: make one here"
            if is_own
            else f"the connection to rank {rank} is closed: if it has ended, its log says why"
        )
        self.rank = rank


class TransportFailed(CollectiveError):
    """`__cause__` is the operating system's error."""


class PeerRefused(CollectiveError):
    """The other end is not a member of the group, or no longer one."""


class BackendUnavailable(CollectiveError):
    """Says what is missing."""
