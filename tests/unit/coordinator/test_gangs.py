"""A coordinator that dies while a gang restarts; other histories are in `histories/gangs.txt`."""

from collections.abc import Callable

import pytest

from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import JobStatus
from tests.support.stories import Story, starts
from tests.support.successors import successor


def live(story: Story) -> Story:
    story.executes(*(rank.rank for rank in story.job.ranks if rank.is_alive)).plans()
    assert story.job.status is JobStatus.RUNNING
    return story


MOMENTS: dict[str, Callable[[Story], object]] = {
    "one died": lambda story: story.dies(1),
    "the others were asked to go": lambda story: story.dies(1).plans(),
    "one has gone": lambda story: (story.dies(1).plans(), story.dies(0, signal=15)),
    "one was done before": lambda story: story.exits(0).dies(1).plans(),
    "none is left": lambda story: is_idle(story.dies(1)),
    "all were started": lambda story: (is_idle(story.dies(1)), story.passes(60).plans()),
}


def is_idle(story: Story) -> None:
    story.plans()
    for rank in story.job.ranks:
        if rank.is_alive and rank.attempt.intent.terminated_at is not None:
            story.dies(rank.rank, signal=15)
    story.plans()


@pytest.mark.parametrize("agents", [[LOCAL_HOST], []])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_takeover_during_a_restart_completes_it(moment: str, agents: list[str]) -> None:
    left = Story.gang()
    MOMENTS[moment](left)
    left.plans()
    story = successor(left, agents=agents)
    story.plans()
    story.agent_connects()
    is_idle(story)
    if not story.job.any_alive:
        assert starts(story.passes(60).plans()) == [0, 1, 2]
    live(story)
    (attempt,) = {rank.attempt.number for rank in story.job.ranks}
    assert attempt >= 1
    assert sum(rank.budget.restarts for rank in story.job.ranks) == 1
    for rank in story.job.ranks:
        story.exits(rank.rank)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED
