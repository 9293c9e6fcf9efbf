"""Maps a step to its place in the data, by arithmetic on what was fixed at submission."""

from dataclasses import dataclass
from typing import ClassVar

from muster.contracts.job.field_types import CheckpointEvery
from muster.contracts.messages.rank import EpochDone
from muster.contracts.shards import HASH_MODULUS, Position
from muster.datasets.index import Totals
from muster.datasets.order import steps_per_epoch
from muster.training.groups.state_sync import Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Batch size, epochs and seed of a job, and the totals of its data set."""

    totals: Totals
    """Of the whole data set, from its index."""
    batch_size: int
    virtual_shards: int
    epochs: int
    seed: int
    checkpoint_every: CheckpointEvery
    last_step: int | None = None
    """Where training ends although it has more steps; None: it does not."""

    drop_last: ClassVar[bool] = False
    """Whether an epoch leaves out the samples that do not fill its last batch."""

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.totals.lines, self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def is_over(self, committed: Committed) -> bool:
        last = self.total_steps if self.last_step is None else self.last_step
        return committed.is_stopped or committed.position.step >= min(last, self.total_steps)

    def ends_epoch(self, committed: Committed) -> bool:
        """Return whether a step was the last of its epoch, or of training."""
        _, step_in_epoch = self.epoch_and_step(committed.position.step)
        return step_in_epoch == 0 or self.is_over(committed)

    def is_checkpoint_due(self, committed: Committed, *, is_time: bool) -> bool:
        """Return whether to save after a step; `is_time` decides if `checkpoint_every` is auto."""
        every = self.checkpoint_every
        is_due = is_time if every == "auto" else committed.position.step % every == 0
        return is_due or self.is_over(committed)

    def expected(self, epoch: int) -> Totals:  # noqa: ARG002  others leave samples out
        """Return the totals of what an epoch reads."""
        return self.totals

    def epoch_and_step(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the step's number within it, both from 0."""
        return divmod(step, self.steps_per_epoch)

    def advance(self, committed: Committed, consumed: Totals) -> Committed:
        """Return what is committed after the step at `committed`, which read `consumed`.

        `line_idx` counts the samples of the epoch, in the epoch's own order.
        """
        epoch, step_in_epoch = self.epoch_and_step(committed.position.step)
        # The counts of an epoch begin anew with its first step.
        before = committed.position if step_in_epoch else Position()
        count = before.consumed + consumed.lines
        position = Position(
            step=committed.position.step + 1,
            epoch=epoch,
            line_idx=count,
            consumed=count,
            consumed_hash=(before.consumed_hash + consumed.hash_sum) % HASH_MODULUS,
        )
        if step_in_epoch + 1 < self.steps_per_epoch:
            return Committed(position=position, epochs=committed.epochs)
        expected = self.expected(epoch)
        done = EpochDone(
            epoch=position.epoch,
            samples=position.consumed,
            hash_sum=position.consumed_hash,
            expected_samples=expected.lines,
            expected_hash_sum=expected.hash_sum,
        )
        return Committed(position=position, epochs=(*committed.epochs, done))
