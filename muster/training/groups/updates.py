"""Worker groups as a rank receives them, from the channel to its agent.

A rank polls before each leaf and whenever it waits for a peer. Only the newest group counts: when
it arrives, the memory that came with an older one is closed. A group that only adds members waits
for the end of the step: its former members are there to finish that. One that has begun another
step meanwhile loses the first that leaves, and follows it with the sums it holds.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from muster.contracts.errors import WireError
from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.messages.wire import decode_group
from muster.runtime.agent_client import AgentSocket

POLL_SECONDS: Final = 0.1
"""How often a rank that waits for a group checks for a stop request."""


class GroupChanged(Exception):
    """A newer group has arrived: leave the current one."""


class StopRequested(Exception):
    """The rank was asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """A worker group and its shared memory: the result's descriptor, then one per member."""

    group: WorkerGroup
    memory: tuple[int, ...] = ()

    def close(self) -> None:
        _close(self.memory)


class GroupUpdates(Protocol):
    """Delivers worker groups to a rank."""

    in_step: bool
    """Whether the rank takes a step in a group that it has joined."""

    def check(self) -> None:
        """Return if nothing changed; raise `GroupChanged` or `StopRequested`. Takes about 1 us."""

    def next(self) -> GroupUpdate:
        """Wait for a group newer than the last one returned; the caller closes it.

        Raises `StopRequested`.
        """


NO_GROUP: Final = WorkerGroup(round=-1, token="", members=(), paused=False)
"""The current group before the first one arrives."""


def is_in_force(current: WorkerGroup, newest: WorkerGroup, *, in_step: bool) -> bool:
    """Return whether a rank stays in `current` although `newest` has arrived.

    It does until the end of its step if `newest` only adds members.
    """
    remaining = {member.worker_id for member in newest.members}
    return in_step and remaining.issuperset(member.worker_id for member in current.members)


class AgentGroupUpdates:
    """Groups that the agent sends. Until the next one arrives, the current one stays in force."""

    def __init__(self, agent_socket: AgentSocket, should_stop: Callable[[], bool]) -> None:
        self._socket = agent_socket
        self._should_stop = should_stop
        self._current = NO_GROUP
        self._newest: GroupUpdate | None = None
        self.in_step = False

    def check(self) -> None:
        self._receive()
        if self._should_stop():
            raise StopRequested
        newest = self._newest
        if newest and not is_in_force(self._current, newest.group, in_step=self.in_step):
            raise GroupChanged

    def next(self) -> GroupUpdate:
        while self._newest is None:
            if self._should_stop():
                raise StopRequested
            self._socket.wait_for_packet(POLL_SECONDS)
            self._receive()
        newest, self._newest = self._newest, None
        self._current = newest.group
        return newest

    def _receive(self) -> None:
        # All that have come: each of them holds descriptors until it is closed.
        while (packet := self._socket.receive()) is not None:
            self._keep_newest(*packet)

    def _keep_newest(self, content: bytes, memory: Sequence[int]) -> None:
        try:
            update = GroupUpdate(group=decode_group(content), memory=tuple(memory))
        except WireError:
            _close(memory)
            return
        known = self._current if self._newest is None else self._newest.group
        if update.group.round <= known.round:
            update.close()
            return
        if self._newest is not None:
            self._newest.close()
        self._newest = update


class SingleRankUpdates:
    """The only group of a rank that was started by hand: itself."""

    def __init__(self, rank: int, should_stop: Callable[[], bool]) -> None:
        member = GroupMember(worker_id=0, rank=rank, host="", port=0)
        self._group = WorkerGroup(round=0, token="", members=(member,), paused=False)
        self._should_stop = should_stop
        self.in_step = False

    def check(self) -> None:
        if self._should_stop():
            raise StopRequested

    def next(self) -> GroupUpdate:
        return GroupUpdate(group=self._group)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
