"""Workers of a pool, their states and ranks."""

from coordinator.decide.state import GroupSnapshot
from muster.contracts.pool import WorkerState
from tests.support.stories import Story

LAST_STEP = 100
"""The total steps that `stories.beat` reports."""

SYNCING, ACTIVE, DRAINING, FAILED, LEFT = WorkerState


def states(story: Story) -> list[WorkerState]:
    """Return the state of every present or former worker, by its id."""
    return [member.state for member in story.job.pool.members]


def members(group: GroupSnapshot) -> dict[int, int]:
    """Return the rank of each worker."""
    return dict(zip(group.workers, group.ranks, strict=True))


def active_ranks(story: Story) -> list[int]:
    return [member.rank for member in story.job.pool.active]
