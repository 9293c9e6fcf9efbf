"""What the stories of a pool ask about: its workers, their states and their ranks."""

from stories import Story

from coordinator.snapshot import LayoutSnapshot
from muster.contracts.pool import WorkerState

LAST_STEP = 100
"""Of the jobs in these stories: what `stories.beat` says."""

SYNCING, ACTIVE, DRAINING, FAILED, LEFT = WorkerState


def states(story: Story) -> list[WorkerState]:
    """Return the state of every worker there ever was, by its id."""
    return [member.state for member in story.job.pool.members]


def members(layout: LayoutSnapshot) -> dict[int, int]:
    """Return which worker has which rank."""
    return dict(zip(layout.workers, layout.ranks, strict=True))


def active_ranks(story: Story) -> list[int]:
    return [member.rank for member in story.job.pool.active]
