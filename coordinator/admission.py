"""Which waiting jobs may start now: first come, first served, by slots. Pure.

Nobody overtakes: a large job at the head waits for room, and those behind it wait for the job, so
that a stream of small ones cannot starve it. A job larger than all slots runs when it is alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why the job at this place in the queue is not started."""

    message: str


def admit(waiting: Sequence[int], *, used: int, slots: int) -> tuple[int, list[Wait]]:
    """Return how many jobs from the head may start, and why each of the others waits.

    `waiting` holds the slots that each job wants, in order of submission; `used` are taken.
    """
    admitted = 0
    for wanted in waiting:
        if not _fits(wanted, used, slots):
            break
        used += wanted
        admitted += 1
    free = max(0, slots - used)
    return admitted, [
        _wait(wanted, free, slots, ahead) for ahead, wanted in enumerate(waiting[admitted:])
    ]


def _fits(wanted: int, used: int, slots: int) -> bool:
    return used + wanted <= slots or used == 0


def _wait(wanted: int, free: int, slots: int, ahead: int) -> Wait:
    if ahead:
        jobs = "1 job is" if ahead == 1 else f"{ahead} jobs are"
        return Wait(message=f"waits for {wanted} of {slots} slots; {jobs} ahead of it")
    if wanted > slots:
        return Wait(
            message=f"needs {wanted} slots, more than the {slots} there are: it starts when no "
            "other job runs"
        )
    return Wait(
        message=f"waits for {wanted} of {slots} slots; {free} {'is' if free == 1 else 'are'} free"
    )
