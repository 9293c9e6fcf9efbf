"""Every pair of states of every state machine against its table."""

from collections.abc import Callable, Collection
from enum import StrEnum
from itertools import product

import pytest

from muster.contracts import job, rank
from muster.contracts.errors import IllegalMove, MusterError
from muster.contracts.job import TERMINAL, JobStatus
from muster.contracts.rank import ProcessState

JOB_PAIRS = list(product(JobStatus, repeat=2))
RANK_PAIRS = list(product(ProcessState, repeat=2))


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
    live    -> suspect exited
    suspect -> live exited
    """
)


@pytest.mark.parametrize(("current", "target"), JOB_PAIRS)
def test_job_moves_follow_the_table(current: JobStatus, target: JobStatus) -> None:
    assert_moves_by(JOB_MOVES, job.move, current, target)


@pytest.mark.parametrize(("current", "target"), RANK_PAIRS)
def test_process_moves_follow_the_table(current: ProcessState, target: ProcessState) -> None:
    assert_moves_by(RANK_MOVES, rank.move, current, target)


def assert_moves_by(
    allowed: Collection[tuple[StrEnum, StrEnum]],
    move: Callable[[StrEnum, StrEnum], StrEnum],
    current: StrEnum,
    target: StrEnum,
) -> None:
    if (current, target) in allowed:
        assert move(current, target) is target
        return
    with pytest.raises(IllegalMove) as caught:
        move(current, target)
    error = caught.value
    assert (error.current, error.target) == (current, target)
    assert str(error) == f"{type(current).__name__} cannot move from {current} to {target}"
    assert isinstance(error, MusterError)


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
