"""What has happened to a job since one last looked. Pure: what happened is asked for elsewhere."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.client.views import EventView


def news(events: "Sequence[EventView]", last: "EventView | None") -> "Sequence[EventView]":
    """Return what came after the event `last`; all, if that is so long ago that it is not there."""
    for index in range(len(events) - 1, -1, -1):
        if events[index] == last:
            return events[index + 1 :]
    return events
