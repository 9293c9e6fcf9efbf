"""What the trainer of one rank continues from."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from muster.collectives.errors import ChannelClosed
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import Block
from muster.collectives.simulated import SimulatedBackend
from muster.contracts.messages.rank import GroupMember
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.program import Contribution, State
from muster.runtime.fingerprint import fingerprint
from muster.training.batches import BlockBatches
from muster.training.blocks import BusyFlag, Computer, Tasks
from muster.training.groups.group import Group
from muster.training.groups.replay import Replay
from muster.training.groups.state_sync import Committed, Replica
from muster.training.groups.updates import GroupUpdate, GroupUpdates, SingleRankUpdates
from muster.training.schedule import Schedule
from muster.training.schema import GradientSchema
from muster.training.trainer import Outcome, Trainer

SCHEDULE = Schedule(
    totals=Totals(lines=8, hash_sum=0),
    batch_size=2,
    virtual_shards=1,
    epochs=1,
    seed=0,
    checkpoint_every=100,
)


class Loader:
    def load(self, _step: int, block: Block) -> BlockBatches:
        ones = np.ones(block.size, np.float32)
        counts = np.zeros((block.size, 9), np.float32)
        return BlockBatches(batches=[None] * block.size, weights=ones, sample_counts=counts)


class Counter(Computer):
    """Counts steps in memory of its own, beside the replica."""

    steps = -1

    def __init__(self) -> None:
        schema = GradientSchema(parts=(), metrics=())
        super().__init__(SCHEDULE, schema, Loader(), BusyFlag())

    def take_over(self, replica: Replica) -> None:
        self.steps = replica.position.step

    def update(self, state: State, gradients: State, step: int, target: State) -> None:  # noqa: ARG002
        assert step == self.steps
        self.steps += 1


class Callbacks:
    """Loads a state; the first exchange after that breaks. Everything else is ignored."""

    def __init__(self, loaded: Committed, breaks: int) -> None:
        self.loaded, self.breaks = loaded, breaks

    def load_state(self, _group: object, replica: Replica) -> None:
        replica.commit({"x": np.zeros(1, np.float32)}, self.loaded)
        self.breaks -= 1
        if self.breaks >= 0:
            raise ChannelClosed(1)

    def is_best(self, _replica: Replica) -> bool:
        return False

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Groups:
    port = 0

    def __init__(self, slots: Vector) -> None:
        self._slots = slots

    def create(self, _update: object) -> Group:
        (backend,) = SimulatedBackend.create_group(1, limit_bytes=1 << 20)
        return Group(backend, MessageReducer(backend, self._slots))


class OneGroup(SingleRankUpdates):
    """The only group, of which just this rank is real."""

    def __init__(self, ranks: Sequence[int] = (0,), exporter: int | None = None) -> None:
        super().__init__(0, lambda: False)
        members = tuple(GroupMember(worker_id=it, rank=it, host="", port=0) for it in ranks)
        self.facts = {"members": members, "exporter": exporter}

    def next(self) -> GroupUpdate:
        group = super().next().group
        return GroupUpdate(group=msgspec.structs.replace(group, **self.facts))


def train(loaded: Committed, breaks: int = 0, stops_after: int = -1) -> tuple[Counter, Replica]:
    trainer, computer, replica = trainer_of(loaded, breaks)
    assert run(trainer, stops_after) is Outcome.DONE
    return computer, replica


def trainer_of(
    loaded: Committed, breaks: int = 0, updates: GroupUpdates | None = None
) -> tuple[Trainer, Counter, Replica]:
    computer, replica = Counter(), Replica({"x": np.zeros(1, np.float32)})
    trainer = Trainer(
        computer=computer,
        replay=Replay(computer, None),
        replica=replica,
        updates=updates or OneGroup(),
        groups=Groups(np.zeros((1, computer.elements), np.float32)),
        callbacks=Callbacks(loaded, breaks),
        arithmetic=fingerprint(),
    )
    return trainer, computer, replica


def run(trainer: Trainer, stops_after: int) -> Outcome:
    tasks: Tasks[Outcome] = trainer.train()
    while True:
        try:
            task = next(tasks)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        trainer.stop_requested |= task.leaf.step == stops_after
        task.contribution = Contribution({}, 0.0)


@pytest.mark.parametrize("breaks", [0, 1])
def test_a_state_is_taken_over_if_the_exchange_breaks_after_it_came(breaks: int) -> None:
    computer, _ = train(Committed(position=Position(step=2)), breaks)
    assert computer.steps == 4


def test_training_stops_after_the_step_whose_body_asks_for_it() -> None:
    computer, replica = train(Committed(position=Position(step=0)), stops_after=1)
    assert (computer.steps, replica.committed.is_stopped) == (2, True)


def test_a_request_to_stop_that_was_saved_holds_after_the_next_step() -> None:
    loaded = Committed(position=Position(step=1), stop_requested=True)
    computer, replica = train(loaded)
    assert (computer.steps, replica.committed.is_stopped) == (2, True)


def test_a_state_that_was_stopped_takes_no_step() -> None:
    computer, _ = train(Committed(position=Position(step=1), is_stopped=True))
    assert computer.steps == 1


@pytest.mark.parametrize(("named", "exporter"), [(None, 1), (2, 2)])
def test_the_lowest_rank_exports_unless_another_was_named(named: int | None, exporter: int) -> None:
    updates = OneGroup(ranks=(3, 1), exporter=named)
    trainer, _, _ = trainer_of(Committed(position=Position(step=0)), updates=updates)
    assert run(trainer, -1) is Outcome.DONE
    assert trainer.exporter == exporter


def test_a_request_to_stop_is_no_part_of_the_digest() -> None:
    digests = set()
    for requested in (False, True):
        replica = Replica({"x": np.zeros(1, np.float32)})
        committed = Committed(position=Position(step=1), stop_requested=requested)
        replica.commit({"x": np.zeros(1, np.float32)}, committed)
        digests.add(replica.digest())
    assert len(digests) == 1
