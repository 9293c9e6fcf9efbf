"""Gathers the ranks of a layout: hands every one of them the layout and the memory to meet in.

The memory is anonymous and made here, because whoever made it decides who sees it. An arena belongs
to one incarnation and is given to nobody after it. What all members write to is made anew for each
layout: a rank of an older one that was stopped and wakes up still has memory of its own to write
to, and nobody reads it any more.
"""

import os
import socket
from collections.abc import Sequence
from typing import Final

from muster.contracts.messages import Announce
from worker.child import Child
from worker.nursery import Nursery

RESULT_NAME: Final = "muster-result"


class Assembly:
    """Delivers the newest layout to every rank that lives."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._order: Announce | None = None
        self._result: int | None = None
        self._audience: list[Child] = []
        self._told: dict[Child, socket.socket | None] = {}
        """By which channel; a rank that has lost that may have lost the layout with it."""

    def announce(self, order: Announce) -> None:
        """Tell all ranks; an order that is not newer than the last one is ignored."""
        if self._order is not None and order.layout.generation <= self._order.layout.generation:
            return
        if self._result is not None:
            os.close(self._result)
            self._result = None
        self._order = order
        self._audience, self._told = self._nursery.living, {}
        self.deliver()

    def deliver(self) -> None:
        """Tell who has not been told by the channel it has now; to be called now and then.

        A layout with a member that is gone is told to nobody any more: whoever ordered it hears
        of the death, and orders another. One that there is no memory for is told to nobody yet.
        """
        untold = [child for child in self._audience if self._is_untold(child)]
        if not untold or self._order is None:
            return
        members = self._members(self._order)
        if None in members:
            self._audience = []
            return
        try:
            memory = self._memory(members)
        except OSError:  # no descriptor or memory to be had now
            return
        self._audience = [child for child in self._nursery.living if child in self._audience]
        for child in self._audience:
            # Who is not a member has no business with its memory.
            if self._is_untold(child) and child.tell(
                self._order.layout, memory if child in members else []
            ):
                self._told[child] = child.channel

    def _memory(self, members: Sequence[Child | None]) -> list[int]:
        """Return the result and everybody's arena; what is there already is not made again."""
        if self._result is None:
            self._result = os.memfd_create(RESULT_NAME, os.MFD_CLOEXEC)
        return [self._result, *(member.arena for member in members if member is not None)]

    def _is_untold(self, child: Child) -> bool:
        return child not in self._told or self._told[child] is not child.channel

    def _members(self, order: Announce) -> Sequence[Child | None]:
        return [
            self._nursery.find(seat.rank, incarnation)
            for seat, incarnation in zip(order.layout.seats, order.incarnations, strict=True)
        ]
