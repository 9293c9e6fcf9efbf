"""Send each rank the current worker group, with the shared memory of its members.

The memory is anonymous (memfd), so only ranks that get a descriptor can see it. An arena belongs to
one attempt and is never reused. The result, which all members write, is created anew for each group
round: a rank of an older round that was suspended still writes into memory that nothing reads.
"""

import os
import socket
from typing import Final

from muster.contracts.messages import AnnounceGroup
from worker.rank import RankProcess
from worker.ranks import RankTable

RESULT_NAME: Final = "muster-result"


class GroupPublisher:
    """Delivers the newest worker group to every running rank."""

    def __init__(self, ranks: RankTable) -> None:
        self._ranks = ranks
        self._order: AnnounceGroup | None = None
        self._result: int | None = None
        self._recipients: list[RankProcess] = []
        self._sent_on: dict[RankProcess, socket.socket | None] = {}
        """The channel on which a rank received it; a new channel may have lost it."""

    def publish(self, order: AnnounceGroup) -> None:
        """Send a group to all ranks; one that is not newer than the last is ignored."""
        if self._order is not None and order.layout.generation <= self._order.layout.generation:
            return
        if self._result is not None:
            os.close(self._result)
            self._result = None
        self._order = order
        self._recipients, self._sent_on = self._ranks.running, {}
        self.deliver()

    def deliver(self) -> None:
        """Send the group to every rank that has not received it on its current channel.

        To be called at every tick. A group with a member that has exited is dropped: the
        coordinator will send another one. Without free memory, it is tried again later.
        """
        if self._order is None or not any(map(self._is_pending, self._recipients)):
            return
        found = [
            self._ranks.find(seat.rank, attempt)
            for seat, attempt in zip(
                self._order.layout.members, self._order.incarnations, strict=True
            )
        ]
        members = [member for member in found if member is not None]
        if len(members) < len(found):
            self._recipients = []
            return
        try:
            if self._result is None:
                self._result = os.memfd_create(RESULT_NAME, os.MFD_CLOEXEC)
            memory = [self._result, *(member.arena for member in members)]
        except OSError:
            return
        self._recipients = [rank for rank in self._ranks.running if rank in self._recipients]
        for rank in self._recipients:
            # Only members get the memory.
            if self._is_pending(rank) and rank.send_group(
                self._order.layout, memory if rank in members else []
            ):
                self._sent_on[rank] = rank.channel

    def _is_pending(self, rank: RankProcess) -> bool:
        return rank not in self._sent_on or self._sent_on[rank] is not rank.channel
