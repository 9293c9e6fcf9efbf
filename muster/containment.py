"""Containment: what a rank starts ends with the rank, and nothing else ever does.

A rank is enclosed before the first line of its program runs; whoever ends it later, its agent, an
agent that adopted it or a coordinator, knows what belongs to it from the kernel alone, and needs
nothing that a dead predecessor knew.
"""

import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from muster.brand import brands, can_brand, wear_brand
from muster.cells import cell_of, clear_cell, enter_cell
from muster.contracts.process import ProcessRecord
from muster.processes import branded, descendants, identify, mark_of, send_signal

PATIENCE_SECONDS: Final = 0.05
"""What was killed is gone within a millisecond or two; an agent has others to look after."""

PAUSE_SECONDS: Final = 0.001


def enclose(mark: str) -> None:
    """Make sure that whatever this process starts can be found by `mark`, an incarnation's."""
    wear_brand(mark)
    enter_cell(mark)


def end_incarnation(mark: str) -> bool:
    """Kill all that an incarnation started, and itself; return whether nothing of it is left.

    Zombies are nothing. What hangs in the kernel makes it False: to be called again.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not _has_ended(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def _has_ended(mark: str) -> bool:
    cell = cell_of(mark)
    is_clear = cell is None or clear_cell(cell)
    # Each one at once, before it can fork and go: a list of all of them is soon out of date.
    killed = [send_signal(record, signal.SIGKILL) for record in _bearers(mark)]
    return is_clear and not any(killed)


def _bearers(mark: str) -> Iterator[ProcessRecord]:
    if can_brand():
        yield from branded(brands(mark))
        return
    # The environment may be a copy, of somebody who looks for a fault: only below us it counts.
    for pid in descendants(os.getpid()):
        if mark_of(pid) == mark and (record := identify(pid)) is not None:
            yield record
