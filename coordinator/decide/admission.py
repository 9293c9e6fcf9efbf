"""Which queued jobs may start now: first come, first served, by slots. Pure.

No job overtakes another: a large job at the head waits for room and the jobs behind it wait too, so
that a stream of small jobs cannot starve it. A job larger than all slots runs when it is alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

NAMED: Final = 3  # how many of the jobs that hold slots a message names; it counts the others


class Claim(NamedTuple):
    """How many slots a job wants or holds."""

    job_id: str
    slots: int


def admit(
    waiting: Iterable[Claim], holding: Iterable[Claim], slots: int
) -> Iterator[tuple[()] | str]:
    """Yield for each job an empty tuple if it may start, or a sentence why it waits.

    `waiting` is in order of submission; `holding` are the jobs that have left the queue.
    """
    held, ahead = list(holding), 0
    used = sum(claim.slots for claim in held)
    for claim in waiting:
        if ahead or (used and used + claim.slots > slots):
            yield _describe_wait(claim.slots, held, max(0, slots - used), slots, ahead)
            ahead += 1
        else:
            held.append(claim)
            used += claim.slots
            yield ()


def _describe_wait(wanted: int, held: Sequence[Claim], free: int, slots: int, ahead: int) -> str:
    if ahead:
        jobs = "1 job is" if ahead == 1 else f"{ahead} jobs are"
        return f"waits for {wanted} of {slots} slots; {jobs} ahead of it"
    if wanted > slots:
        return (
            f"needs {wanted} slots, more than the {slots} there are (MUSTER_SLOTS): it starts when "
            "no other job runs"
        )
    free_slots = "1 is free" if free == 1 else f"{free} are free"
    return f"waits for {wanted} of {slots} slots (MUSTER_SLOTS); {free_slots}, {_holders(held)}"


def _holders(held: Sequence[Claim]) -> str:
    names = [claim.job_id for claim in held if claim.slots]
    more = len(names) - NAMED
    *others, last = [*names[:NAMED], *([f"{more} more"] if more > 0 else [])]
    if others:
        return f"{', '.join(others)} and {last} hold the others"
    return f"{last} holds the others"
