"""Ranks over shared memory without services: the trainer, and a plain loop as its baseline.

    python bench/_ranks.py alone|beside DATA BATCH_SIZE RANK PARENT DESCRIPTOR ...

The plain loop computes the same leaves of the same batches and adds them one after the other into
one vector per rank. Ranks exchange their sums in the same way. The loop checks nothing.
With `beside`, each step of the trainer is followed by one of the plain loop in the same process, so
that both use the same memory and cores under the same load.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from _programs import Perceptron

from muster.collectives.reduction.tree import Block
from muster.collectives.transports.arena import Geometry
from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.shards import Position
from muster.datasets.random_access import RandomAccess
from muster.datasets.sources import open_source
from muster.runtime.fingerprint import fingerprint
from muster.training.batches import BatchLoader, decoder_of
from muster.training.blocks import BlockComputer, BusyFlag, LeafRng
from muster.training.groups.group import Group, SharedMemoryGroupFactory
from muster.training.groups.replay import Replay
from muster.training.groups.state_sync import Committed, Replica
from muster.training.groups.updates import GroupUpdate
from muster.training.schedule import Schedule
from muster.training.schema import Leaf
from muster.training.start import keep_freed_memory
from muster.training.trainer import Trainer

VIRTUAL_SHARDS = 32
STEPS = 24
WARM_UP_STEPS = 4


class Cost(NamedTuple):
    """Seconds per step; medians over the steps."""

    cpu: float
    """CPU time of all ranks together."""
    plain_cpu: float
    """CPU time of the plain loop; 0 if it did not run."""
    clock: float


def run(how: str, data: Path, batch_size: int, world_size: int) -> Cost:
    """Train with `world_size` ranks and return the cost of a step."""
    memory = [os.memfd_create("bench") for _ in range(2 * (world_size + 1))]
    common = (how, data, batch_size)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *map(str, (*common, rank, os.getpid(), *memory))],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    costs = [json.loads(rank.communicate()[0]) for rank in ranks]
    for descriptor in memory:
        os.close(descriptor)
    cpu, plain_cpu, clock = zip(*costs, strict=True)
    return Cost(sum(cpu), sum(plain_cpu), max(clock))


class Instant(NamedTuple):
    """CPU time of this process and monotonic clock, in seconds."""

    cpu: float
    clock: float

    @classmethod
    def now(cls) -> "Instant":
        return cls(time.process_time(), time.monotonic())


class Rank:
    """One process."""

    def __init__(self, data: Path, batch_size: int, rank: int, memory: tuple[int, ...]) -> None:
        data_access = RandomAccess(open_source(data))
        self.program = Perceptron()
        self.schedule = Schedule(
            totals=data_access.totals,
            batch_size=batch_size,
            virtual_shards=VIRTUAL_SHARDS,
            epochs=STEPS * batch_size // data_access.totals.lines,
            seed=0,
            checkpoint_every=1 << 30,
        )
        self.initial = self.program.initial(0)
        self.computer = BlockComputer(
            self.program, self.schedule, data_access, self.initial, BusyFlag()
        )
        self.loader = BatchLoader(self.schedule, data_access, decoder_of(self.program))
        self.rank, self.world_size = rank, len(memory) // 2 - 1
        members = [
            GroupMember(worker_id=n, rank=n, host="", port=0) for n in range(self.world_size)
        ]
        group = WorkerGroup(round=1, token="", members=tuple(members), paused=False)
        half = len(memory) // 2
        self.update = GroupUpdate(group=group, memory=memory[:half])
        self.plain_update = GroupUpdate(group=group, memory=memory[half:])
        self.geometry = Geometry(slot_count=VIRTUAL_SHARDS, elements=self.computer.elements)
        self.steps: list[tuple[Instant, Instant]] = []
        """The end of each of the trainer's steps, and the beginning of the next."""

    # GroupUpdates and TrainerCallbacks

    in_step = False

    def check(self) -> None:
        """The group never changes."""

    def next(self) -> GroupUpdate:
        return self.update

    def load_state(self, _group: WorkerGroup, replica: Replica) -> None:
        replica.commit(self.initial, Committed(position=Position()))

    def _ignore(self, *_: object) -> None:
        """Callback that this benchmark does not need."""

    on_group_joined = on_peer_lost = on_state_mismatch = on_step = _ignore
    save_checkpoint = on_checkpoint_failed = wait_before_retry = _ignore

    def wait_between_steps(self, _check: object) -> None:
        before = Instant.now()
        if self.plain is not None:
            next(self.plain)
        self.steps.append((before, Instant.now()))

    # Two ways to train

    def train(self, *, is_beside: bool) -> None:
        self.plain = self.plain_steps() if is_beside else None
        trainer = Trainer(
            computer=self.computer,
            replay=Replay(self.computer, None),
            replica=Replica(self.initial),
            updates=self,
            groups=SharedMemoryGroupFactory(self.rank, self.geometry, self),
            callbacks=self,
            arithmetic=fingerprint(),
        )
        self.computer.run(trainer.train())

    def costs(self) -> Cost:
        taken = self.steps[WARM_UP_STEPS:]
        return Cost(
            median(after[0].cpu - before[1].cpu for before, after in pairwise(taken)),
            median(after.cpu - before.cpu for before, after in taken),
            median(after[0].clock - before[1].clock for before, after in pairwise(taken)),
        )

    def plain_steps(self) -> Iterator[None]:
        level = (VIRTUAL_SHARDS // self.world_size).bit_length() - 1
        blocks = [(Block(level, rank),) for rank in range(self.world_size)]
        state = self.initial
        groups = SharedMemoryGroupFactory(self.rank, self.geometry, self)
        group = groups.create(self.plain_update)
        if group is None:
            raise RuntimeError("a rank is not a member of its own group")
        with group:
            for step in range(self.schedule.total_steps):
                state = self.plain_step(group, blocks, state, step)
                yield

    def plain_step(self, group: Group, blocks: list, state: dict, step: int) -> dict:
        (mine,) = blocks[self.rank]
        shape, slot = self.computer.schema, group.reducer.slots[0]
        views, weight_at = shape.views(slot), shape.gradient_elements + 1
        random = LeafRng(self.schedule.seed)
        loaded = self.loader.load(step, mine)
        for place, batch in enumerate(loaded.batches):
            generator = random.at(0, Leaf(step, mine.start + place))
            made = self.program.gradient(state, batch, generator)
            numbers = (made.loss, loaded.weights[place])
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
    process.train(is_beside=how == "beside")
    print(json.dumps(process.costs()))


if __name__ == "__main__":
    main()
