"""Links to the current coordinator: the agent's, and those of processes with threads.

The agent's may be lost at any time. Nothing is queued meanwhile: on every new connection the agent
sends its whole state again.
"""

import selectors
import socket
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Final

from muster.contracts.messages.agent import (
    AgentClaim,
    AgentMessage,
    CoordinatorMessage,
    JoinRequest,
    LogHello,
    StoreHello,
)
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.attach import JoinOrder
from muster.contracts.messages.wire import decode_coordinator_message, encode
from muster.contracts.token import sha256_of
from muster.host.files import read_coordinator_address
from muster.host.peers import SEND_TIMEOUT_SECONDS
from muster.links.blocking import BlockingLink
from muster.links.identity import Identity, job_identity
from muster.links.reconnect import Reconnect
from muster.links.selecting import SelectingLink
from muster.links.session import Caller
from muster.runtime.stderr_messages import print_stderr

RETRY_SECONDS: Final = 0.5
"""At least, between two attempts to connect to fixed addresses."""

LOOK_SECONDS: Final = 2.0
"""Between two looks, while nothing comes, whether another coordinator has taken over: one that is
stopped, and not dead, keeps the connection open, and so does an SSH that has lost its other end."""


class CoordinatorLink:
    """At most one connection of the agent, kept in its selector."""

    def __init__(
        self,
        assignment: AgentAssignment,
        selector: selectors.BaseSelector,
        on_message: Callable[[CoordinatorMessage], None],
    ) -> None:
        self._assignment = assignment
        addresses = coordinator_addresses(assignment)
        self._reconnect = Reconnect(addresses, RETRY_SECONDS, say=print_stderr)
        self._retry_at = 0.0
        self._selector = selector
        self._on_message = on_message
        self._link: SelectingLink[CoordinatorMessage] | None = None
        self._address: CoordinatorAddress | None = None
        self.is_welcome = False
        """Whether the coordinator has accepted us; set by the owner, reset with the connection."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or one being established."""
        return self._link is not None

    def connect(self) -> bool:
        """Try once; return whether a connection is being established."""
        self._retry_at = time.monotonic() + RETRY_SECONDS
        try:
            address = self._reconnect.next_address()
            self._link = SelectingLink(
                (address.host, address.port),
                Caller(_identity(self._assignment), is_sealed=self._assignment.is_remote),
                self._selector,
                decode_coordinator_message,
                self._on_message,
                self._on_closed,
            )
        except OSError:
            return False
        self._address = address
        return True

    @property
    def own_address(self) -> str:
        """The address of our end of the connection, where others on its network reach us."""
        return "" if self._link is None else str(self._link.socket.getsockname()[0])

    @property
    def has_new_address(self) -> bool:
        """Whether another address is published than the one we connected to last.

        A coordinator that is suspended keeps its connections although another one has taken over.
        Of fixed addresses, whether the next one may be tried.
        """
        if self._assignment.coordinators:
            return not self.is_open and time.monotonic() >= self._retry_at
        known = read_coordinator_address(Path(self._assignment.address_file))
        return known not in {None, self._address}

    def send(self, message: AgentMessage) -> None:
        """Send once the coordinator has proved itself: any user can bind a freed port.

        Dropped without a connection.
        """
        if self._link is not None:
            self._link.send(encode(message))

    def close(self) -> None:
        """Close the connection, if any."""
        if self._link is not None:
            self._link.close()

    def _on_closed(self, error: Exception | None) -> None:
        self._link, self.is_welcome = None, False
        if error is not None:
            self._reconnect.failed(error, "closed the connection to the coordinator: ")


class HomeLink(BlockingLink):
    """A link of a thread, for as long as no other coordinator takes over."""

    def __init__(
        self,
        own: AgentAssignment | JoinOrder,
        address: CoordinatorAddress,
        hello: LogHello | StoreHello | JoinRequest,
    ) -> None:
        """Connect, and say `hello`. Raises OSError and `AuthenticationFailed`."""
        place = address.host, address.port
        session = Caller(_identity(own))
        session.send(encode(hello))
        super().__init__(socket.create_connection(place, SEND_TIMEOUT_SECONDS), session)
        self._address = address
        self._file: Path | None = None
        if isinstance(own, AgentAssignment) and not own.coordinators:
            self._file = Path(own.address_file)
        self.open()

    def has_news(self, seconds: float) -> bool:
        if super().has_news(seconds):
            return True
        known = None if self._file is None else read_coordinator_address(self._file)
        if known not in {None, self._address}:
            raise ConnectionError("another coordinator has taken over")
        return False

    def receive(self) -> bytes:
        while not self.has_news(LOOK_SECONDS):
            pass
        return super().receive()


def coordinator_addresses(own: AgentAssignment) -> Callable[[], CoordinatorAddress]:
    """Return what says where the coordinator may be, with each call for another attempt.

    It raises `ConnectionError` while nothing is known.
    """
    if own.coordinators:
        return cycle(own.coordinators).__next__

    def published() -> CoordinatorAddress:
        address = read_coordinator_address(Path(own.address_file))
        if address is None:
            raise ConnectionError("there is no coordinator")
        return address

    return published


def _identity(own: AgentAssignment | JoinOrder) -> Identity:
    claim = AgentClaim(job_uid=own.job_uid, host=own.host, generation=own.generation)
    return job_identity(encode(claim), sha256_of(own.token))
