"""Shares in a model that is small enough for every leaf of its sum to be looked at."""

from stage import Regression

from muster.datasets.drawing import Drawer
from muster.program import Program
from muster.synchronous.course import Course
from muster.synchronous.shares import Shares
from muster.synchronous.work import Work

LEAVES = 8
SAMPLES = 50
"""Three full batches of 16 and one of 2."""


def shares_of(drawer: Drawer, program: Program | None = None, work: Work | None = None) -> Shares:
    """Return what a rank has of two epochs."""
    course = Course(
        totals=drawer.totals,
        batch_size=16,
        virtual_shards=LEAVES,
        epochs=2,
        seed=3,
        checkpoint_every=5,
    )
    program = program or Regression()
    return Shares(program, course, drawer, program.initial(3), work or Work())
