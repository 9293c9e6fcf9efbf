"""The training loop of one rank: compute a part of the sum, all-reduce, take the step.

When a peer joins, leaves or dies, the loop abandons what it was doing, joins the new worker group
and continues. Finished block sums of the current step are kept and everything else is recomputed,
so a change of group does not change the bits.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from muster.checkpoints.errors import CheckpointFailed
from muster.collectives.errors import CollectiveError
from muster.collectives.reduction.reducer import Reducer, Vector
from muster.collectives.reduction.tree import Block, BlockAssignment, assign_blocks
from muster.contracts.messages.rank import WorkerGroup
from muster.host.trace import stamp
from muster.runtime.fingerprint import ANY_BITS, Fingerprint
from muster.runtime.save_timer import SaveTimer
from muster.training.blocks import STOP_REQUESTS, Computer, Tasks
from muster.training.groups.group import PEER_TIMEOUT_SECONDS, Group, GroupFactory, WorkersDiverged
from muster.training.groups.replay import Replay
from muster.training.groups.state_sync import (
    Committed,
    Replica,
    compare_states,
    sync_state,
    take_first_state,
)
from muster.training.groups.updates import GroupChanged, GroupUpdate, GroupUpdates, StopRequested
from muster.training.sample_count import decode_sample_count
from muster.training.schema import Leaf, Means


class Outcome(Enum):
    """Why the training of a rank ended."""

    DONE = auto()
    """Every step is taken and the last checkpoint is durable."""
    STOPPED = auto()
    """A stop was requested; the state is saved if this rank was the one to save it."""
    LEFT = auto()
    """The group continues without this rank."""


class CheckCosts:
    """How long this rank took to compare what it had computed. Its first step is apart."""

    def __init__(self) -> None:
        self.first_seconds: float | None = None
        """What checks took in the first step, which is checked more than later ones."""
        self._check_seconds = self._step_seconds = 0.0
        self.last_seconds = 0.0  # after the last checkpoint; there is no step to compare it with

    def add(self, check_seconds: float, step_seconds: float) -> None:
        if self.first_seconds is None:
            self.first_seconds = check_seconds
            return
        self._check_seconds += check_seconds
        self._step_seconds += step_seconds

    def __str__(self) -> str:
        share = self._check_seconds / self._step_seconds if self._step_seconds else 0.0
        return (
            f"checks took {self.first_seconds or 0:.3f} s of the first step and {share:.2%} since"
            f", {self.last_seconds:.3f} s after the last checkpoint"
        )


class TrainerCallbacks(Protocol):
    """Loads and saves the state, and reports progress, on behalf of a `Trainer`."""

    def load_state(self, worker_group: WorkerGroup, replica: Replica) -> None:
        """Fill an empty replica from the newest checkpoint, or with the initial state."""

    def on_group_joined(self, worker_group: WorkerGroup, replica: Replica) -> None:
        """All members hold this replica. Called once per group, before its first step."""

    def on_peer_lost(self, worker_group: WorkerGroup, error: CollectiveError) -> None:
        """A peer is gone; no step follows until the next group."""

    def on_state_mismatch(self, worker_group: WorkerGroup, error: WorkersDiverged) -> None:
        """Some members hold or compute other bits. Called on every member that is still there."""

    def on_step(self, replica: Replica, means: Means) -> None:
        """A step is committed. It is lost only if all ranks die before the next checkpoint.

        `means` is valid until the next step.
        """

    def is_best(self, replica: Replica) -> bool:
        """Return whether the program has reported that this state is the best so far."""

    def save_checkpoint(self, worker_group: WorkerGroup, replica: Replica) -> None:
        """Save the replica; called on one member of the group.

        On a disk it is durable when this returns. In an object store it is durable when `flush`
        returns, except after the last step, where this waits as well. Raises `CheckpointError`; the
        replica stays whole in any case.
        """

    def flush(self) -> None:
        """Wait until what was saved is durable. Raises `CheckpointError` if it is not."""

    def on_checkpoint_failed(self, replica: Replica, error: CheckpointFailed) -> None:
        """`save_checkpoint` failed; it will be tried again."""

    def wait_before_retry(self, check: Callable[[], None]) -> None:
        """Wait before the last checkpoint is tried again; call `check` meanwhile."""

    def wait_between_steps(self, check: Callable[[], None]) -> None:
        """Wait for as long as the job asks for after each step; call `check` meanwhile."""


class Trainer:
    """One rank of one synchronous job.

    A stepper: it decides which leaf comes next, adds, agrees with its peers, updates and saves, and
    yields each leaf to its caller, which computes it.
    """

    def __init__(
        self,
        *,
        computer: Computer,
        replay: Replay,
        replica: Replica,
        updates: GroupUpdates,
        groups: GroupFactory,
        callbacks: TrainerCallbacks,
        arithmetic: Fingerprint,
    ) -> None:
        self._computer: Final = computer
        self._schedule: Final = computer.schedule
        self._replay: Final = replay
        self._replica: Final = replica
        self._updates: Final = updates
        self._groups: Final = groups
        self._callbacks: Final = callbacks
        self._arithmetic: Final = arithmetic
        self._compression: Final = computer.compression
        self._groups_of_leaves: Final = 0 if self._compression is None else self._compression.groups
        self._held: Final[list[Block]] = []
        """Blocks of step `_held_step` whose sums are in the slots, in slot order."""
        self._held_step = -1
        self._slots: Vector | None = None
        """The slots of the previous group: a new agent hands out new memory."""
        self._group: WorkerGroup | None = None
        self.is_saver = False
        """True if this member writes the group's checkpoints."""
        self.stop_requested = False
        """True once this rank's program wants to stop. It is added to the next sum, so that all
        ranks stop after the same step."""
        self._taken: Committed | None = None
        """What the computer continues from."""
        self._saved_step = -1
        self._save_timer: Final = SaveTimer()
        self.costs: Final = CheckCosts()

    @property
    def exporter(self) -> int:
        """After the loop, the rank that exports: the lowest of the last group."""
        if self._group is None:
            raise RuntimeError("there was no group")
        named = self._group.exporter
        return min(member.rank for member in self._group.members) if named is None else named

    def train(self) -> Tasks[Outcome]:
        """Train until this rank has nothing left to do, and yield the leaves to compute.

        Raises `InvalidProgram`, and `WorkersDiverged` if this rank is the one that diverged.
        """
        try:
            while True:
                outcome = yield from self._train_in_group(self._updates.next())
                if outcome is not None:
                    return outcome
        except StopRequested:
            if self.is_saver and self._group is not None:
                self._save(self._group)
                self._callbacks.flush()
                yield from self._end_steps()
            return Outcome.STOPPED

    def _train_in_group(self, update: GroupUpdate) -> Tasks[Outcome | None]:
        """Train with the members of one group; return None if another group follows."""
        worker_group, is_newcomer = update.group, self._group is None
        stamp("group received", round=worker_group.round)
        self.is_saver = False
        self._saved_step = -1  # a save for an earlier group may have failed since
        try:
            created = self._groups.create(update)
            if created is None:
                # A newcomer still receives groups that were made before it reported ready.
                return None if is_newcomer else Outcome.LEFT
            self._group = worker_group
            with created as group:
                assignment = yield from self._sync(worker_group, group)
                if worker_group.paused:
                    if worker_group.save:
                        self._save_with_retries(worker_group)
                    group.backend.barrier(timeout_seconds=PEER_TIMEOUT_SECONDS)
                    yield from self._end_steps()
                    return None
                yield from self._take_steps(worker_group, group, assignment)
                return Outcome.DONE
        except WorkersDiverged as error:
            self._callbacks.on_state_mismatch(worker_group, error)
            if error.includes_this_rank:
                raise
            return None
        except GroupChanged:
            return None
        except CollectiveError as error:
            self._callbacks.on_peer_lost(worker_group, error)
            return None
        finally:
            update.close()  # a mapping needs no descriptor

    def _sync(self, worker_group: WorkerGroup, group: Group) -> Tasks[BlockAssignment]:
        """Reach the state that all members hold; return the blocks each member contributes."""
        if group.reducer.slots is not self._slots:
            self._slots = group.reducer.slots
            self._held.clear()
        result = sync_state(
            group.backend,
            self._replica,
            self._held_blocks(),
            self._schedule.virtual_shards,
            self._arithmetic,
            lambda: self._callbacks.load_state(worker_group, self._replica),
            self._schedule.totals,
            groups=self._groups_of_leaves,
        )
        self._take_over()
        yield from self._computer.checks.meet(group.backend, self._replica, self._updates.check)
        self.is_saver = group.backend.rank == 0
        stamp("group joined", step=self._replica.position.step)
        self._callbacks.on_group_joined(worker_group, self._replica)
        return self._replay.split(result.assignment, self._replica.position.step, result.held)

    def _take_over(self) -> None:
        """Let the computer continue from the replica, if that came from elsewhere."""
        # Its position does not tell: it may be from an exchange that failed after it had come.
        if self._replica.committed is not self._taken:
            self._computer.take_over(self._replica)
            self._taken = self._replica.committed
            self.stop_requested |= self._taken.stop_requested

    def _take_steps(
        self, worker_group: WorkerGroup, group: Group, assignment: BlockAssignment
    ) -> Tasks[None]:
        """Take every remaining step; return once the last checkpoint is durable."""
        shards, size = self._schedule.virtual_shards, group.backend.world_size
        even = assign_blocks([()] * size, shards, self._groups_of_leaves, group.backend.hosts)
        is_best = self._callbacks.is_best(self._replica)  # its saver may have died
        wants_save = self.is_saver and (worker_group.save or is_best)
        wants_save = wants_save and not self._try_to_save(worker_group, is_requested=True)
        while not self._schedule.is_over(self._replica.committed):
            step = self._replica.position.step
            begun_at, check_seconds = time.monotonic(), 0.0
            with self._in_step():
                while self._replica.position.step == step:
                    check_seconds += yield from self._take_turn(group, assignment)
            self.costs.add(check_seconds, time.monotonic() - begun_at)
            if self._schedule.ends_epoch(self._replica.committed):
                if self._arithmetic.digest == ANY_BITS:
                    take_first_state(group.backend, self._replica)
                    self._take_over()
                else:  # a hook of one rank alone may have changed its state
                    compare_states(group.backend, self._replica)
            assignment = self._replay.split(even, step + 1)
            is_due = self._schedule.is_checkpoint_due(
                self._replica.committed, is_time=self._save_timer.is_due()
            )
            wants_save |= self.is_saver and self._callbacks.is_best(self._replica)
            # A requested one that has failed is tried again after each step.
            if wants_save or (is_due and self.is_saver):
                wants_save &= not self._try_to_save(worker_group, is_requested=wants_save)
            self._updates.check()
            self._callbacks.wait_between_steps(self._updates.check)
        self._save_with_retries(worker_group)
        # Only the saver knows when the checkpoint is durable, and only then is training done.
        group.backend.barrier(timeout_seconds=PEER_TIMEOUT_SECONDS)

    def _end_steps(self) -> Tasks[None]:
        """Compute a shard of the next step, which is kept beside the last checkpoint."""
        leaf, began_at = Leaf(self._replica.position.step, 0), time.monotonic()
        is_over = self._schedule.is_over(self._replica.committed)
        if self._computer.checks.is_kept(leaf.step) and not is_over:
            yield from self._computer.compute_again(leaf, self._replica.state)
        self.costs.last_seconds = time.monotonic() - began_at

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        self._updates.in_step = True
        try:
            yield
        finally:
            self._updates.in_step = False
            # A step is taken in full or not at all: nothing of its middle is sent or saved.
            if self._computer.turn:
                self._computer.undo_turns()
                self._held.clear()

    def _take_turn(self, group: Group, assignment: BlockAssignment) -> Tasks[float]:
        """Take a step, or one turn of it; return how many seconds checks took."""
        step, blocks = self._replica.position.step, assignment[group.backend.rank]
        yield from self._compute(group.reducer, blocks)
        computed_at = time.monotonic()
        yield from self._computer.checks.check(
            group.backend, self._replica.state, step, self._updates.check
        )
        check_seconds = time.monotonic() - computed_at
        # In a slot that is summed. A rank without blocks asks again in the next step.
        if self.stop_requested and blocks:
            group.reducer.slots[0][STOP_REQUESTS] = 1
        if self._compression is not None:
            self._compression.begin(step, self._computer.turn)
        total = group.reducer.all_reduce(assignment, timeout_seconds=PEER_TIMEOUT_SECONDS)
        yield from self._replay.check(
            group.backend, self._replica.state, step, assignment, group.reducer.slots
        )
        self._commit(total)
        return check_seconds

    def _compute(self, reducer: Reducer, blocks: Sequence[Block]) -> Tasks[None]:
        """Write the sums of this rank's blocks into the slots; held ones are there already."""
        step, state, held = self._replica.position.step, self._replica.state, self._held_blocks()
        for block in blocks[len(held) :]:
            slots = reducer.slots[len(held) :]
            try:
                yield from self._computer.sum_up(block, state, step, slots[0], self._updates.check)
            except GroupChanged:
                held += yield from self._computer.take_finished(slots)
                raise
            held.append(block)
        self._updates.check()

    def _held_blocks(self) -> list[Block]:
        """Return the blocks of the present step whose sums are in the slots.

        The step may have changed since: a peer's state was received in a group that has ended.
        """
        if self._held_step != self._replica.position.step:
            self._held.clear()
            self._held_step = self._replica.position.step
        return self._held

    def _commit(self, total: Vector) -> None:
        """Take the step. An error before `Replica.commit` leaves the last state untouched."""
        step = self._replica.position.step
        elements = self._computer.schema.elements
        means = self._computer.schema.means(total[:elements], self._computer.means)
        if self._compression is not None and self.is_saver:  # one rank, so that it is one curve
            metrics = {**self._compression.costs(), **means.metrics}
            means = dataclasses.replace(means, metrics=metrics)
        consumed = decode_sample_count(total[elements:STOP_REQUESTS])
        state = self._replica.other
        self._computer.update(self._replica.state, means.gradients, step, state)
        if self._computer.turn:
            self._held.clear()  # they are sums of the turn before
            return
        committed = self._schedule.advance(self._replica.committed, consumed)
        committed = msgspec.structs.replace(
            committed,
            values=self._computer.values,
            is_stopped=bool(total[STOP_REQUESTS]),
            stop_requested=self.stop_requested,
        )
        self._replica.commit(state, committed)
        self._taken = committed
        stamp("step", step=step + 1)
        self._callbacks.on_step(self._replica, means)

    def _try_to_save(self, worker_group: WorkerGroup, *, is_requested: bool = False) -> bool:
        """Make the current step durable; return False if the disk refused, which may pass.

        In an object store only a requested one is durable at once.
        """
        try:
            self._save(worker_group)
            if is_requested:
                self._callbacks.flush()
        except CheckpointFailed as error:
            self._callbacks.on_checkpoint_failed(self._replica, error)
            return False
        return True

    def _save_with_retries(self, worker_group: WorkerGroup) -> None:
        while self.is_saver and not self._try_to_save(worker_group, is_requested=True):
            self._callbacks.wait_before_retry(self._updates.check)

    def _save(self, worker_group: WorkerGroup) -> None:
        step = self._replica.position.step
        if not self._replica.is_empty and step != self._saved_step:
            with self._save_timer.saving():
                self._callbacks.save_checkpoint(worker_group, self._replica)
            self._saved_step = step
