"""Errors of communication between ranks. Misuse of the interface raises ValueError.

CollectiveError
├── SizeMismatch          the message does not have the size that the receiver expects
├── TimedOut              nothing arrived in time; the backend stays usable
├── ChannelClosed         the other end is gone, or this one was closed
├── TransportFailed       the operating system reported an error
├── PeerRefused           wrong token or generation, or invalid data
├── BackendUnavailable    this machine does not support the backend
└── Unsupported           the operation has no such route
"""

from muster.contracts.errors import MusterError


class CollectiveError(MusterError):
    """Base of all errors between ranks."""


class SizeMismatch(CollectiveError):
    def __init__(self, expected_bytes: int, got_bytes: int) -> None:
        super().__init__(
            f"expected a message of {expected_bytes} bytes, got {got_bytes}: "
            "use the same size on both ends"
        )


class TimedOut(CollectiveError):
    def __init__(self, seconds: float, waited_for: str) -> None:
        super().__init__(
            f"{waited_for} did not arrive within {seconds:g} s: "
            "check the other ranks, or set a longer timeout"
        )


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
    """Says which routes the operation has."""
