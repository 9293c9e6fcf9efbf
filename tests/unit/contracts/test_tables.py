"""Every pair of states of every state machine against its table."""

from collections.abc import Callable, Collection
from enum import StrEnum
from functools import partial
from itertools import product

import pytest

from muster.contracts import pool, rank
from muster.contracts.errors import IllegalMove, move
from muster.contracts.job import status as job
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.pool import LIVING, WorkerState
from muster.contracts.rank import ProcessState


def allowed_moves(words: str) -> set[tuple[str, str]]:
    lines = [line.split() for line in words.splitlines() if line.strip()]
    return {(current, target) for current, _, *targets in lines for target in targets}


JOB_MOVES = allowed_moves(
    """
    QUEUED     -> STARTING STOPPED FAILED
    STARTING   -> RUNNING RECOVERING STOPPING COMPLETED FAILED QUEUED
    RUNNING    -> RECOVERING PAUSED STOPPING COMPLETED FAILED
    RECOVERING -> RUNNING PAUSED STOPPING COMPLETED FAILED
    PAUSED     -> RUNNING RECOVERING STOPPING COMPLETED FAILED
    STOPPING   -> STOPPED COMPLETED FAILED QUEUED
    """
)

RANK_MOVES = allowed_moves(
    """
    spawned -> live exited
    live    -> suspect exiting exited
    suspect -> live exiting exited
    exiting -> live exited
    """
)


WORKER_MOVES = allowed_moves(
    """
    syncing  -> active failed
    active   -> draining failed
    draining -> left
    """
)

PAIRS = [
    (allowed, own_move, *pair)
    for allowed, own_move, states in (
        (JOB_MOVES, partial(move, job.TRANSITIONS), JobStatus),
        (RANK_MOVES, partial(move, rank.TRANSITIONS), ProcessState),
        (WORKER_MOVES, partial(move, pool.TRANSITIONS), WorkerState),
    )
    for pair in product(states, repeat=2)
]


@pytest.mark.parametrize(("allowed", "own_move", "current", "target"), PAIRS)
def test_moves_follow_the_table(
    allowed: Collection[tuple[str, str]],
    own_move: Callable[[StrEnum, StrEnum], StrEnum],
    current: StrEnum,
    target: StrEnum,
) -> None:
    if (current, target) in allowed:
        assert own_move(current, target) is target
        return
    with pytest.raises(IllegalMove) as caught:
        own_move(current, target)
    assert (caught.value.current, caught.value.target) == (current, target)
    words = f"{type(current).__name__} cannot move from {current} to {target}"
    assert str(caught.value) == words


@pytest.mark.parametrize("status", list(JobStatus))
def test_terminal_job_states_have_no_moves(status: JobStatus) -> None:
    assert (status in TERMINAL) == (not job.TRANSITIONS[status])


@pytest.mark.parametrize("status", [status for status in JobStatus if status not in TERMINAL])
def test_every_job_state_reaches_an_end(status: JobStatus) -> None:
    reached, new = set[JobStatus](), {status}
    while new:
        reached |= new
        new = set[JobStatus]().union(*(job.TRANSITIONS[at] for at in new)) - reached
    assert {JobStatus.STOPPED, JobStatus.FAILED} <= reached


def test_living_workers_have_moves_left() -> None:
    assert {state for state in WorkerState if pool.TRANSITIONS[state]} == LIVING
