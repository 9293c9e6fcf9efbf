"""Ranks over shared memory without a service: the trainer, and a bare loop to hold against it.

    python bench/_ranks.py tree|plain DATA BATCH_SIZE RANK PARENT DESCRIPTOR ...

The bare loop computes the same leaves of the same batches and adds them one after the other into
one vector per rank. What ranks have added up is exchanged in the same way. It checks nothing.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _programs import Perceptron

from muster.collectives.arena import Geometry
from muster.collectives.tree import Block
from muster.contracts.messages import Layout, Seat
from muster.contracts.position import Position
from muster.datasets.drawing import Drawer
from muster.datasets.listing import find_shards
from muster.program import decoder_of
from muster.shapes import Leaf
from muster.synchronous.allocator import keep_freed_memory
from muster.synchronous.chance import Chance
from muster.synchronous.course import Course
from muster.synchronous.layouts import Gathering
from muster.synchronous.meeting import Group, SharedMemoryMeeting
from muster.synchronous.replay import Replay
from muster.synchronous.replica import Committed, Replica
from muster.synchronous.shares import Shares
from muster.synchronous.supply import Supply
from muster.synchronous.trainer import Trainer

VIRTUAL_SHARDS = 32
STEPS = 12
WARM_UP_STEPS = 2


def run(how: str, data: Path, batch_size: int, world_size: int) -> tuple[float, float]:
    """Return the CPU seconds of a step, of all ranks together, and its seconds on the clock."""
    memory = [os.memfd_create("bench") for _ in range(world_size + 1)]
    common = (how, data, batch_size)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *map(str, (*common, rank, os.getpid(), *memory))],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    said = [json.loads(rank.communicate()[0]) for rank in ranks]
    for descriptor in memory:
        os.close(descriptor)
    return sum(cpu for cpu, _ in said), max(clock for _, clock in said)


class Rank:
    """One process."""

    def __init__(self, data: Path, batch_size: int, rank: int, memory: tuple[int, ...]) -> None:
        drawer = Drawer(find_shards(data))
        self.program = Perceptron()
        self.course = Course(
            totals=drawer.totals,
            batch_size=batch_size,
            virtual_shards=VIRTUAL_SHARDS,
            epochs=STEPS * batch_size // drawer.totals.lines,
            seed=0,
            checkpoint_every=1 << 30,
        )
        self.initial = self.program.initial(0)
        self.shares = Shares(self.program, self.course, drawer, self.initial)
        self.supply = Supply(self.course, drawer, decoder_of(self.program))
        self.rank, self.world_size = rank, len(memory) - 1
        seats = [Seat(worker_id=n, rank=n, host="", port=0) for n in range(self.world_size)]
        layout = Layout(generation=1, token="", seats=tuple(seats), paused=False)
        self.gathering = Gathering(layout=layout, memory=memory)
        geometry = Geometry(slot_count=VIRTUAL_SHARDS, elements=self.shares.elements)
        self.meeting = SharedMemoryMeeting(rank, geometry, self)
        self.times: list[tuple[float, float]] = []

    # The layouts of a trainer, and its witness

    def attend(self) -> None:
        """Nothing ever changes."""

    def next(self) -> Gathering:
        return self.gathering

    def begin(self, _layout: Layout, replica: Replica) -> None:
        replica.flip(self.initial, Committed(position=Position()))

    def stepped(self, *_: object) -> None:
        self.times.append((time.process_time(), time.monotonic()))

    def nothing(self, *_: object) -> None:
        """Nobody is told."""

    took_up = stranded = disputed = keep = rest = nothing

    # Two ways to train

    def tree(self) -> None:
        replica = Replica(self.initial)
        trainer = Trainer(
            shares=self.shares,
            replay=Replay(self.shares, None),
            replica=replica,
            layouts=self,
            meeting=self.meeting,
            witness=self,
        )
        trainer.run()

    def plain(self) -> None:
        level = (VIRTUAL_SHARDS // self.world_size).bit_length() - 1
        blocks = [(Block(level, rank),) for rank in range(self.world_size)]
        state = self.initial
        group = self.meeting.enter(self.gathering)
        if group is None:
            raise RuntimeError("a rank is not among the members of its own layout")
        with group:
            for step in range(self.course.total_steps):
                state = self.plain_step(group, blocks, state, step)
                self.stepped()

    def plain_step(self, group: Group, blocks: list, state: dict, step: int) -> dict:
        (mine,) = blocks[self.rank]
        shape, slot = self.shares.shape, group.reducer.slots[0]
        views, weight_at = shape.views(slot), shape.gradient_elements + 1
        chance = Chance(self.course.seed)
        portion = self.supply.portion(step, mine)
        for place, batch in enumerate(portion.batches):
            random = chance.of(0, Leaf(step, mine.start + place))
            made = self.program.gradient(state, batch, random)
            numbers = (made.loss, portion.weights[place])
            if place == 0:
                slot[weight_at - 1 : weight_at + 1] = numbers
            else:
                slot[weight_at - 1 : weight_at + 1] += numbers
            for part, view in zip(shape.parts, views, strict=True):
                array = made.gradients[part.name]
                np.copyto(view, array) if place == 0 else np.add(view, array, out=view)
        total = group.reducer.all_reduce(blocks)
        means = shape.views(total / total[weight_at])
        names = [part.name for part in shape.parts]
        return self.program.update(state, dict(zip(names, means, strict=True)), step)


def main() -> None:
    how, data, *numbers = sys.argv[1:]
    batch_size, rank, parent, *memory = map(int, numbers)
    opened = [os.open(f"/proc/{parent}/fd/{number}", os.O_RDWR) for number in memory]
    keep_freed_memory()
    process = Rank(Path(data), batch_size, rank, tuple(opened))
    process.tree() if how == "tree" else process.plain()
    first, last = process.times[WARM_UP_STEPS], process.times[-1]
    count = len(process.times) - 1 - WARM_UP_STEPS
    print(json.dumps([(end - start) / count for start, end in zip(first, last, strict=True)]))


if __name__ == "__main__":
    main()
