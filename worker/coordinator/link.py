"""Links to the current coordinator: the agent's, and those of processes with threads.

The agent's may be lost at any time. Nothing is queued meanwhile: on every new connection the agent
sends its whole state again.
"""

import selectors
import socket
import time
from collections.abc import Callable
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
from muster.host.addresses import read_coordinator_address
from muster.host.peers import SEND_TIMEOUT_SECONDS
from muster.links.blocking import BlockingLink
from muster.links.identity import Identity, job_identity
from muster.links.selecting import SelectingLink
from muster.links.session import Caller
from muster.runtime.stderr_messages import LastMessage, print_stderr

RETRY_SECONDS: Final = 0.5
"""At least, between two attempts to connect to the same address."""

POLL_SECONDS: Final = 2.0
"""Between two checks, while a link stands still, whether another coordinator has taken over: one
that is stopped, and not dead, keeps it open, and so does an SSH that has lost its other end."""


class AddressFile:
    """Where this host reaches the coordinator, for one link that follows it."""

    def __init__(self, own: AgentAssignment) -> None:
        self._path = Path(own.address_file)
        self._place: tuple[str, int] | None = None

    @property
    def is_on_this_host(self) -> bool:
        """True if the coordinator is here: its directory of a job is that of the agent."""
        address = read_coordinator_address(self._path)
        return address is not None and address.is_on_this_host

    def take(self) -> CoordinatorAddress:
        """Return the address to connect to. Raises `ConnectionError` while there is none."""
        address = read_coordinator_address(self._path)
        if address is None:
            raise ConnectionError("there is no coordinator")
        self._place = address.place
        return address

    @property
    def has_changed(self) -> bool:
        """True if another coordinator has taken over since, or another way leads to it."""
        known = read_coordinator_address(self._path)
        return known is not None and known.place != self._place


class CoordinatorLink:
    """At most one connection of the agent, kept in its selector."""

    def __init__(
        self,
        assignment: AgentAssignment,
        selector: selectors.BaseSelector,
        on_message: Callable[[CoordinatorMessage], None],
    ) -> None:
        self._assignment = assignment
        self._file = AddressFile(assignment)
        self._problem = LastMessage()
        self._retry_at = 0.0
        self._selector = selector
        self._on_message = on_message
        self._link: SelectingLink[CoordinatorMessage] | None = None
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
            address = self._file.take()
            # An agent that was started from another host may be on the coordinator's by now.
            is_sealed = address.is_remote or (
                self._assignment.is_remote and not address.is_on_this_host
            )
            self._link = SelectingLink(
                address.place,
                Caller(_identity(self._assignment), is_sealed=is_sealed),
                self._selector,
                decode_coordinator_message,
                self._on_message,
                self._on_closed,
            )
        except OSError:
            return False
        return True

    @property
    def own_address(self) -> str:
        """The address of our end of the connection, where others on its network reach us."""
        return "" if self._link is None else str(self._link.socket.getsockname()[0])

    @property
    def has_new_address(self) -> bool:
        """Whether another address is published than the one we connected to last.

        A coordinator that is suspended keeps its connections although another one has taken over.
        Without a connection, also whether the same address may be tried again.
        """
        return self._file.has_changed or (not self.is_open and time.monotonic() >= self._retry_at)

    @property
    def is_on_this_host(self) -> bool:
        """Whether the coordinator is."""
        return self._file.is_on_this_host

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
        if error is not None and self._problem.is_new(str(error)):
            print_stderr(f"closed the connection to the coordinator: {error}")


class ThreadLink(BlockingLink):
    """A link of a thread, for as long as no other coordinator takes over."""

    def __init__(
        self,
        own: AgentAssignment | JoinOrder,
        hello: LogHello | StoreHello | JoinRequest,
        address: CoordinatorAddress,
        file: AddressFile | None = None,
    ) -> None:
        """Connect, and say `hello`; the link ends once `file` names another address.

        Raises OSError and `AuthenticationFailed`.
        """
        self._file = file
        session = Caller(_identity(own), is_sealed=not address.is_on_this_host)
        session.send(encode(hello))
        super().__init__(socket.create_connection(address.place, POLL_SECONDS), session)
        self._open_by = time.monotonic() + SEND_TIMEOUT_SECONDS
        self.open()

    def has_news(self, seconds: float) -> bool:
        if super().has_news(seconds):
            return True
        self._check_file()
        return False

    def on_timeout(self, error: TimeoutError) -> None:
        if not self._session.is_open and time.monotonic() >= self._open_by:
            raise error
        self._check_file()

    def _check_file(self) -> None:
        if self._file is not None and self._file.has_changed:
            raise ConnectionError("another coordinator has taken over")


def _identity(own: AgentAssignment | JoinOrder) -> Identity:
    claim = AgentClaim(job_uid=own.job_uid, host=own.host, agent_number=own.agent_number)
    return job_identity(encode(claim), sha256_of(own.token))
