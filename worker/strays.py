"""What still runs of a job when an agent begins, and is nobody's.

An agent that was killed may have started a rank that nobody has heard of, left its template or half
a fork, or be only stopped itself. Whatever the new agent is not told to adopt, it ends before it
starts anything: no incarnation is ever there twice.
"""

import os
from collections.abc import Collection
from typing import Final

from muster.brand import brand_of, brands
from muster.cells import cell_name, cells_of_job, clear_cell
from muster.contracts.process import ProcessRecord
from muster.patience import Patience
from muster.processes import kill, mark_of, marked
from muster.remarks import remark

STRAYS_PATIENCE: Final = Patience(seconds=2.0, pause_seconds=0.01)
"""A process that survives SIGKILL for this long hangs in the kernel, and ranks wait."""


def end_strays(job_uid: str, spared: Collection[str]) -> None:
    """Kill every process of the job but this one and those of the incarnations that are `spared`.

    `spared` holds their marks. What they have started is theirs by its brand, whatever else it
    has lost; so is what a stray has started, and that goes with it.
    """
    left = STRAYS_PATIENCE.outlast(lambda: _end_each(job_uid, spared))
    if left:
        remark(f"{left} processes or cells of the job survive SIGKILL")


def _end_each(job_uid: str, spared: Collection[str]) -> int:
    """Return how many were there to be ended."""
    spared_cells = {cell_name(mark) for mark in spared}
    cells = [cell for cell in cells_of_job(job_uid) if cell.name not in spared_cells]
    left = [cell for cell in cells if not clear_cell(cell)]
    return len(left) + sum(kill(record) for record in _strays(job_uid, spared))


def _strays(job_uid: str, spared: Collection[str]) -> list[ProcessRecord]:
    prefix = f"{job_uid}/"
    of_job, of_spared = brands(prefix), {brand for mark in spared for brand in brands(mark)}

    def is_spared(pid: int) -> bool:
        brand = brand_of(pid)
        if brand in of_job:
            return brand in of_spared
        # An agent, a template, a rank in its first milliseconds; or nothing is to be known of it.
        mark = mark_of(pid)
        return mark is None or mark in spared

    return [
        record
        for record in marked(prefix)
        if record.pid != os.getpid() and not is_spared(record.pid)
    ]
