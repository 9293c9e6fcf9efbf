"""The loop of one rank: compute a share of the sum, add it up with the others, take the step.

Whenever the group changes, by a peer that joins, leaves or dies, the loop leaves what it was doing,
takes up the new layout and goes on: sums of whole blocks that it has already are kept, everything
else is computed again, and the bits do not know.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np

from muster.checkpoints.errors import CheckpointFailed
from muster.collectives.backend import Reducer, Vector
from muster.collectives.errors import CollectiveError
from muster.collectives.tree import Block, Deal, deal
from muster.contracts.messages import Layout
from muster.fingerprint import fingerprint
from muster.shapes import Means
from muster.synchronous.gathering import PEER_PATIENCE_SECONDS
from muster.synchronous.layouts import Gathering, Layouts, Regroup, Stopped
from muster.synchronous.meeting import Group, Meeting
from muster.synchronous.replay import Replay
from muster.synchronous.replica import Replica
from muster.synchronous.shares import Shares
from muster.synchronous.taking_up import Differs, take_up
from muster.synchronous.tally import read_tally


class Outcome(Enum):
    """Why a rank's training is over."""

    DONE = auto()
    """Every step is taken and the last checkpoint is durable."""
    STOPPED = auto()
    """It was asked to stop; what it stands for is saved if that was its to do."""
    LEFT = auto()
    """The others go on without it."""


class Witness(Protocol):
    """Is told what becomes of the training, and keeps what must not be lost."""

    def begin(self, layout: Layout, replica: Replica) -> None:
        """Fill an empty replica: from the newest checkpoint, or else with the initial state."""

    def took_up(self, layout: Layout, replica: Replica) -> None:
        """Hear that all members hold this replica; once per layout, before its first step."""

    def stranded(self, layout: Layout, error: CollectiveError) -> None:
        """Hear that a peer is lost; nothing follows until there is another layout."""

    def disputed(self, layout: Layout, differs: Differs) -> None:
        """Hear who holds or computes other bits; every member that is still there is told."""

    def stepped(self, replica: Replica, means: Means) -> None:
        """Hear that a step is taken: it can be undone only if all ranks die before `keep`.

        `means` are good until the next step.
        """

    def keep(self, layout: Layout, replica: Replica) -> None:
        """Make the replica durable before returning; called by one member of the group.

        Raises a `CheckpointError`; the replica is whole in any case.
        """

    def unkept(self, replica: Replica, error: CheckpointFailed) -> None:
        """Hear that `keep` has failed for now; it is tried again, at the latest after a `pause`."""

    def pause(self, attend: Callable[[], None]) -> None:
        """Let time go by before the last checkpoint is tried again; calls `attend` meanwhile."""

    def rest(self, attend: Callable[[], None]) -> None:
        """Take the pause that the job asks for after each step; calls `attend` meanwhile."""


class Trainer:
    """One rank of one synchronous job."""

    def __init__(
        self,
        *,
        shares: Shares,
        replay: Replay,
        replica: Replica,
        layouts: Layouts,
        meeting: Meeting,
        witness: Witness,
    ) -> None:
        self._shares: Final = shares
        self._course: Final = shares.course
        self._means: Final = np.empty(shares.shape.elements, np.float32)
        self._replay: Final = replay
        self._replica: Final = replica
        self._layouts: Final = layouts
        self._meeting: Final = meeting
        self._witness: Final = witness
        self._arithmetic: Final = fingerprint()
        self._held: Final[list[Block]] = []
        """Blocks of the unfinished step whose sums lie in the slots, in their order."""
        self._slots: Vector | None = None
        """The slots of the group before: an agent that takes over gives everybody new memory."""
        self._layout: Layout | None = None
        self._keeps = False
        """Whether it is this member that makes checkpoints."""
        self._kept_step = -1

    def run(self) -> Outcome:
        """Train until there is nothing left to do for this rank.

        Raises `InvalidProgram`, and `Differs` if this rank is the one that computed differently.
        """
        try:
            while True:
                outcome = self._train_with(self._layouts.next())
                if outcome is not None:
                    return outcome
        except Stopped:
            if self._keeps and self._layout is not None:
                self._keep(self._layout)
            return Outcome.STOPPED

    def _train_with(self, gathering: Gathering) -> Outcome | None:
        """Train with the members of one layout; return None if there is to be another one."""
        layout, is_newcomer = gathering.layout, self._layout is None
        self._keeps = False
        try:
            meeting = self._meeting.enter(gathering)
            if meeting is None:
                # A newcomer hears of layouts that were made before anybody knew that it was ready.
                return None if is_newcomer else Outcome.LEFT
            self._layout = layout
            with meeting as group:
                shares = self._take_up(layout, group)
                if layout.paused:
                    group.backend.barrier(timeout_seconds=PEER_PATIENCE_SECONDS)
                    return None
                self._steps(layout, group, shares)
                return Outcome.DONE
        except Differs as differs:
            self._witness.disputed(layout, differs)
            if differs.is_me:
                raise
            return None
        except Regroup:
            return None
        except CollectiveError as error:
            self._witness.stranded(layout, error)
            return None
        finally:
            gathering.close()

    def _take_up(self, layout: Layout, group: Group) -> Deal:
        """Come to stand where all members stand; return which blocks each is to contribute."""
        before = self._replica.position
        if group.reducer.slots is not self._slots:
            self._slots = group.reducer.slots
            self._held.clear()
        agreement = take_up(
            group.backend,
            self._replica,
            self._held,
            self._course.virtual_shards,
            self._arithmetic,
            lambda: self._witness.begin(layout, self._replica),
        )
        if self._replica.position != before:
            self._held.clear()
        self._keeps = group.backend.rank == 0
        self._witness.took_up(layout, self._replica)
        return self._replay.deal(agreement.shares, self._replica.position.step, agreement.held)

    def _steps(self, layout: Layout, group: Group, dealt: Deal) -> None:
        """Take every step that is left, and part once the last checkpoint is durable."""
        even = deal([()] * group.backend.world_size, self._course.virtual_shards)
        while not self._course.is_over(self._replica.position):
            step = self._replica.position.step
            self._compute(group.reducer, dealt[group.backend.rank])
            total = group.reducer.all_reduce(dealt, timeout_seconds=PEER_PATIENCE_SECONDS)
            self._replay.check(group.backend, self._replica.state, step, dealt, group.reducer.slots)
            self._commit(total)
            dealt = self._replay.deal(even, step + 1)
            if self._keeps and self._course.is_checkpoint_due(self._replica.position):
                self._is_kept(layout)
            self._witness.rest(self._layouts.attend)
        while self._keeps and not self._is_kept(layout):
            self._witness.pause(self._layouts.attend)
        group.backend.barrier(timeout_seconds=PEER_PATIENCE_SECONDS)

    def _compute(self, reducer: Reducer, mine: Sequence[Block]) -> None:
        """Bring the sums of this rank's blocks into the slots; those that are held stay."""
        step, state = self._replica.position.step, self._replica.state
        for slot in range(len(self._held), len(mine)):
            self._layouts.attend()
            self._shares.write(mine[slot], state, step, reducer.slots[slot])
            self._held.append(mine[slot])
        self._layouts.attend()

    def _commit(self, total: Vector) -> None:
        """Take the step: nothing before the last line changes what a failure would leave."""
        step = self._replica.position.step
        elements = self._shares.shape.elements
        means = self._shares.shape.means(total[:elements], self._means)
        consumed = read_tally(total[elements:])
        state = self._replica.other
        self._shares.update(self._replica.state, means.gradients, step, state)
        self._held.clear()
        self._replica.flip(state, self._course.after(self._replica.committed, consumed))
        self._witness.stepped(self._replica, means)

    def _is_kept(self, layout: Layout) -> bool:
        """Try to make the present step durable; a disk that is full now may not be later."""
        try:
            self._keep(layout)
        except CheckpointFailed as error:
            self._witness.unkept(self._replica, error)
            return False
        return True

    def _keep(self, layout: Layout) -> None:
        """Make the present step durable, unless it is."""
        step = self._replica.position.step
        if not self._replica.is_empty and step != self._kept_step:
            self._witness.keep(layout, self._replica)
            self._kept_step = step
