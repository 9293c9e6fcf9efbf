"""Showing something to somebody who may not look: whoever works does not wait for them.

A terminal that was stopped, or a pipe that nobody reads, keeps whoever writes into it waiting, and
no signal that a process lives through ends that. So it is done in a thread of its own, which may be
left behind: the process ends without it.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeAlias

from muster.remarks import remark

_Wanted: TypeAlias = tuple[Callable[[], None], asyncio.Future[None]]


class Attention:
    """Has one thing shown at a time, until it is left; what fails counts as seen, and is said."""

    def __init__(self) -> None:
        self._wanted = SimpleQueue[_Wanted | None]()
        self._shown: asyncio.Future[None] | None = None
        # One for all that is shown: a machine may be out of threads for a moment.
        threading.Thread(
            target=_show_all, args=[self._wanted], name="attention", daemon=True
        ).start()

    @property
    def is_free(self) -> bool:
        """Whether the next thing can be shown."""
        return self._shown is None or self._shown.done()

    def begin(self, show: Callable[[], None]) -> None:
        """Have it shown from now on; what was begun before comes first."""
        self._shown = asyncio.get_running_loop().create_future()
        self._wanted.put((show, self._shown))

    async def wait(self, patience_seconds: float | None = None) -> None:
        """Return when all that was begun was seen, or patience is at an end."""
        if self._shown is not None:
            await asyncio.wait([self._shown], timeout=patience_seconds)

    def leave(self) -> None:
        """Have nothing more shown; what nobody looks at is left behind."""
        self._wanted.put(None)


def _show_all(wanted: SimpleQueue[_Wanted | None]) -> None:
    said: str | None = None
    while (next_wanted := wanted.get()) is not None:
        show, shown = next_wanted
        failure = _failure_of(show)
        if failure is not None and failure != said:  # looks fail alike, and come often
            remark(
                f"what happens could not be shown ({failure}): the job goes on, and its logs hold "
                "what its ranks print"
            )
            said = failure
        with suppress(RuntimeError):  # the loop has ended, nobody waits any more
            shown.get_loop().call_soon_threadsafe(shown.set_result, None)


def _failure_of(show: Callable[[], None]) -> str | None:
    """Show it; return what went wrong, which must end neither the thread nor the work."""
    try:
        show()
    except Exception as error:  # noqa: BLE001  whoever is shown something may be of any kind
        return f"{type(error).__name__}: {error}"
    return None
