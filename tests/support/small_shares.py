"""Block computers for a model small enough to check every leaf of the sum."""

from muster.datasets.random_access import RandomAccess
from muster.program import Program
from muster.training.blocks import BlockComputer, BusyFlag
from muster.training.schedule import Schedule
from tests.support.stage import Regression

LEAVES = 8
SAMPLES = 50
"""Three full batches of 16 and one of 2."""


def computer_of(
    drawer: RandomAccess, program: Program | None = None, busy: BusyFlag | None = None
) -> BlockComputer:
    """Return what a rank has of two epochs."""
    schedule = Schedule(
        totals=drawer.totals,
        batch_size=16,
        virtual_shards=LEAVES,
        epochs=2,
        seed=3,
        checkpoint_every=5,
    )
    program = program or Regression()
    return BlockComputer(program, schedule, drawer, program.initial(3), busy or BusyFlag())
