"""Containment: what a rank starts ends with the rank, and nothing else ever does.

A rank is enclosed before the first line of its program runs; whoever ends it later, its agent, an
agent that adopted it or a coordinator, knows what belongs to it from the kernel alone, and needs
nothing that a dead predecessor knew.
"""

import os
from collections.abc import Iterator
from typing import Final

from muster.brand import brand_of, brands, can_brand, wear_brand
from muster.cells import cell_of, clear_cell, enter_cell
from muster.contracts.process import ProcessRecord
from muster.patience import Patience
from muster.processes import branded, descendants, identify, kill, mark_of

KILL_PATIENCE: Final = Patience(seconds=0.05, pause_seconds=0.001)
"""What was killed is gone within a millisecond or two; an agent has others to look after."""


def enclose(mark: str) -> None:
    """Make sure that whatever this process starts can be found by `mark`, an incarnation's."""
    wear_brand(mark)
    enter_cell(mark)


def is_enclosed(pid: int, mark: str) -> bool:
    """Return whether a process wears the brand of `mark`; True where no brand can be worn.

    So a mark in an environment, which anybody can copy, is believed only of whoever is below it.
    """
    return not can_brand() or brand_of(pid) in brands(mark)


def end_incarnation(mark: str) -> bool:
    """Kill all that an incarnation started, and itself; return whether nothing of it is left.

    Zombies are nothing. What hangs in the kernel makes it False: to be called again.
    """
    return KILL_PATIENCE.outlast(lambda: _end_each(mark)) == 0


def _end_each(mark: str) -> int:
    cell = cell_of(mark)
    cells_left = 0 if cell is None or clear_cell(cell) else 1
    # Each one at once, before it can fork and go: a list of all of them is soon out of date.
    killed = [kill(record) for record in _bearers(mark)]
    return cells_left + sum(killed)


def _bearers(mark: str) -> Iterator[ProcessRecord]:
    if can_brand():
        yield from branded(brands(mark))
        return
    # The environment may be a copy, of somebody who looks for a fault: only below us it counts.
    for pid in descendants(os.getpid()):
        if mark_of(pid) == mark and (record := identify(pid)) is not None:
            yield record
