"""Which waiting jobs may start now: first come, first served, by slots. Pure.

Nobody overtakes: a large job at the head waits for room, and those behind it wait for the job, so
that a stream of small ones cannot starve it. A job larger than all slots runs when it is alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NAMED: Final = 3
"""So many of those who hold slots are named; of the rest it is said how many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why the job at this place in the queue is not started."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """How many slots a job wants or holds."""

    job_id: str
    slots: int


def admit(
    waiting: Sequence[Claim], *, holding: Sequence[Claim], slots: int
) -> tuple[int, list[Wait]]:
    """Return how many jobs from the head may start, and why each of the others waits.

    `waiting` are in order of submission; `holding` have left the queue.
    """
    held = list(holding)
    used = _used(held)
    for claim in waiting:
        if used and used + claim.slots > slots:
            break
        held.append(claim)
        used += claim.slots
    admitted = len(held) - len(holding)
    return admitted, [
        _wait(claim.slots, held, slots, ahead) for ahead, claim in enumerate(waiting[admitted:])
    ]


def _used(held: Sequence[Claim]) -> int:
    return sum(claim.slots for claim in held)


def _wait(wanted: int, held: Sequence[Claim], slots: int, ahead: int) -> Wait:
    if ahead:
        jobs = "1 job is" if ahead == 1 else f"{ahead} jobs are"
        return Wait(message=f"waits for {wanted} of {slots} slots; {jobs} ahead of it")
    if wanted > slots:
        return Wait(
            message=f"needs {wanted} slots, more than the {slots} there are (MUSTER_SLOTS): it "
            "starts when no other job runs"
        )
    free = max(0, slots - _used(held))
    return Wait(
        message=f"waits for {wanted} of {slots} slots (MUSTER_SLOTS); {free} "
        f"{'is' if free == 1 else 'are'} free, {_holders(held)}"
    )


def _holders(held: Sequence[Claim]) -> str:
    """Return who holds slots: whom to wait for, or to stop."""
    names = [claim.job_id for claim in held if claim.slots]
    more = len(names) - NAMED
    listed = [*names[:NAMED], *([f"{more} more"] if more > 0 else [])]
    *others, last = listed
    return (
        f"{', '.join(others)} and {last} hold the others" if others else f"{last} holds the others"
    )
