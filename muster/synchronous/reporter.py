"""The witness of one rank: tells its agent, writes its log, keeps checkpoints when it is to."""

import atexit
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from muster.checkpoints.errors import CheckpointFailed
from muster.collectives.errors import CollectiveError
from muster.contracts.environ import RankSettings
from muster.contracts.messages import Beat, Disputed, Layout, Saved, Stranded, TookUp
from muster.contracts.position import Position
from muster.presence import Presence
from muster.remarks import narrate
from muster.shapes import Means
from muster.synchronous.course import Course
from muster.synchronous.keeper import Keeper
from muster.synchronous.replica import Arrays, Committed, Replica
from muster.synchronous.taking_up import Differs
from muster.synchronous.trainer import Outcome
from muster.synchronous.work import Work
from muster.voice import Voice

PROGRESS_SECONDS: Final = 1.0
"""At most one progress line a second: a log is read by people."""

REST_PIECE_SECONDS: Final = 0.02
"""A pause is taken in pieces, between which a rank looks whether the layout has changed."""

RETRY_SECONDS: Final = 1.0
"""Between two tries to save the last checkpoint, for a person to make room."""

EPOCHS_AT_ONCE: Final = 256
"""Most passes that one message tells of: whatever a job's length, it fits into the channel."""

_LAST_WORDS: Final = {
    Outcome.DONE: "is done",
    Outcome.STOPPED: "is asked to stop",
    Outcome.LEFT: "leaves; the others go on",
}


class Reporter:
    """A `muster.synchronous.trainer.Witness`."""

    def __init__(self, settings: RankSettings, voice: Voice) -> None:
        self.presence: Final = Presence(voice, settings, self._beat)
        self.work: Final = Work()
        self._settings = settings
        self._course: Course
        self._total_steps: int | None = None
        self._initial: Arrays = {}
        self._keeper = Keeper(settings, self.presence.warn)
        self._position = Position()
        self._means: Means | None = None
        self._checkpoints_saved = 0
        self._last_checkpoint_step: int | None = None
        self._last_trouble: str | None = None
        """What was told of checkpoints that fail, since the last that did not."""
        self._epochs_told = 0
        self._next_line = 0.0
        atexit.register(self._keeper.close)

    def expect(self, initial: Arrays, course: Course) -> None:
        """Say what a job that is not resumed begins with, and which way it goes."""
        self._initial, self._course = initial, course
        self._total_steps = course.total_steps

    def begin(self, layout: Layout, replica: Replica) -> None:
        with self.work:
            self._keeper.claim(layout.generation, len(layout.seats))
            is_resumed = self._keeper.restore(self._initial, replica, self._course)
        if is_resumed:
            self._last_checkpoint_step = replica.position.step
            # Whoever saved it may have died before it could say so.
            self._tell_saved(layout, replica)
            self._say(replica.position.step, "goes on from the checkpoint")
        else:
            initial = {name: array.copy() for name, array in self._initial.items()}
            replica.flip(initial, Committed(position=Position()))

    def took_up(self, layout: Layout, replica: Replica) -> None:
        if layout.seats[0].rank == self._settings.rank:
            # A full disk is said by the save that meets it, and fences then.
            with self.work, suppress(CheckpointFailed):
                self._keeper.claim(layout.generation, len(layout.seats))
        # Who has nothing left to do beats no other step than this one.
        self._position = replica.position
        step = replica.position.step
        self.presence.say(TookUp(generation=layout.generation, step=step))
        held = "is paused" if layout.paused else "goes on"
        self._say(step, f"{held} with {len(layout.seats)} workers")

    def stranded(self, layout: Layout, error: CollectiveError) -> None:
        self.presence.say(Stranded(generation=layout.generation, message=str(error)))

    def disputed(self, layout: Layout, differs: Differs) -> None:
        workers = tuple(layout.seats[place].worker_id for place in differs.places)
        self.presence.say(
            Disputed(generation=layout.generation, workers=workers, message=str(differs))
        )

    def stepped(self, replica: Replica, means: Means) -> None:
        self._position, self._means = replica.position, means
        self.presence.news()
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + PROGRESS_SECONDS
            self._say(replica.position.step, f"loss {means.loss:.4f}")

    def keep(self, layout: Layout, replica: Replica) -> None:
        with self.work:
            self._keeper.save(layout.generation, len(layout.seats), replica, self._course)
        self._checkpoints_saved += 1
        self._last_checkpoint_step = replica.position.step
        self._last_trouble = None
        self._tell_saved(layout, replica)

    def unkept(self, replica: Replica, error: CheckpointFailed) -> None:
        is_over = self._course.is_over(replica.position)
        plan = "the job is done when it succeeds" if is_over else "training goes on meanwhile"
        # Once for each: a disk that is full is full at every try.
        if plan != self._last_trouble:
            self._last_trouble = plan
            self.presence.warn(f"could not save a checkpoint and will try again; {plan}: {error}")

    def _tell_saved(self, layout: Layout, replica: Replica) -> None:
        """Tell of the checkpoint, with every pass that this process has not told of yet.

        The last ones are told again: should a message get lost, the next ones make up for it.
        """
        position, epochs = replica.position, replica.committed.epochs
        first = min(self._epochs_told, max(0, len(epochs) - EPOCHS_AT_ONCE))
        self._epochs_told = len(epochs)
        digest = replica.digest()
        for start in range(first, max(len(epochs), first + 1), EPOCHS_AT_ONCE):
            self.presence.say_patiently(
                Saved(
                    generation=layout.generation,
                    step=position.step,
                    epoch=position.epoch,
                    digest=digest,
                    consumed=position.consumed,
                    consumed_hash=position.consumed_hash,
                    epochs=epochs[start : start + EPOCHS_AT_ONCE],
                )
            )

    def say_goodbye(self, outcome: Outcome) -> None:
        self._say(self._position.step, _LAST_WORDS[outcome])

    def pause(self, attend: Callable[[], None]) -> None:
        self._sleep(RETRY_SECONDS, attend)

    def rest(self, attend: Callable[[], None]) -> None:
        self._sleep(self._settings.sleep_sec, attend)

    def _sleep(self, seconds: float, attend: Callable[[], None]) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            attend()
            time.sleep(min(left, REST_PIECE_SECONDS))

    def _beat(self, stopping: bool) -> Beat:  # noqa: FBT001  what a beat says of itself
        position, means = self._position, self._means
        return Beat(
            step=position.step,
            total_steps=self._total_steps,
            epoch=position.epoch,
            shard_idx=0,
            line_idx=position.line_idx,
            loss=means.loss if means is not None and math.isfinite(means.loss) else None,
            metrics={} if means is None else dict(means.metrics),
            checkpoints_saved=self._checkpoints_saved,
            last_checkpoint_step=self._last_checkpoint_step,
            stopping=stopping,
            waiting=not self.work.is_under_way,
        )

    def _say(self, step: int, words: str) -> None:
        narrate(f"rank {self._settings.rank}  step {step}/{self._total_steps}  {words}")
