"""One rank of a synchronous job: the program, its data, its peers, its checkpoints, wired."""

import atexit
import math
import os
import socket
import time
from pathlib import Path
from typing import Final

import numpy as np

from muster.collectives.arena import Geometry
from muster.collectives.errors import CollectiveError
from muster.contracts.environ import RankSettings
from muster.contracts.messages import Beat, Disputed, Layout, Ready, Saved, Stranded, TookUp
from muster.contracts.position import Position
from muster.datasets.drawing import Drawer
from muster.datasets.errors import DatasetEmpty
from muster.datasets.listing import find_shards
from muster.loading import load
from muster.presence import Presence
from muster.program import Program
from muster.programs.classifier import Classifier
from muster.shapes import Means
from muster.synchronous.course import Course
from muster.synchronous.keeper import Keeper
from muster.synchronous.layouts import Alone, AnnouncedLayouts, Layouts
from muster.synchronous.meeting import SharedMemoryMeeting, SimulatedMeeting
from muster.synchronous.replica import Arrays, Committed, Replica
from muster.synchronous.shares import Shares
from muster.synchronous.taking_up import Differs
from muster.synchronous.trainer import Meeting, Outcome, Trainer
from muster.voice import Voice

PROGRESS_SECONDS: Final = 1.0
"""At most one progress line a second: a log is read by people."""

REST_PIECE_SECONDS: Final = 0.02
"""A pause is taken in pieces, between which a rank looks whether the layout has changed."""


_LAST_WORDS: Final = {
    Outcome.DONE: "is done",
    Outcome.STOPPED: "is asked to stop",
    Outcome.LEFT: "leaves; the others go on",
}


class Reporter:
    """The witness of one rank: tells its agent, writes its log, keeps checkpoints when it is to."""

    def __init__(self, settings: RankSettings, course: Course, initial: Arrays) -> None:
        self.presence: Final = Presence(
            Voice(settings.agent_fd), settings.heartbeat_seconds, self._beat
        )
        self._settings = settings
        self._course = course
        self._initial = initial
        self._keeper = Keeper(settings, self.presence.warn)
        self._position = Position()
        self._means: Means | None = None
        self._checkpoints_saved = 0
        self._last_checkpoint_step: int | None = None
        self._next_line = 0.0
        atexit.register(self._keeper.close)

    def begin(self, replica: Replica) -> None:
        if self._keeper.restore(self._initial, replica):
            self._last_checkpoint_step = replica.position.step
            self._say(replica.position.step, "goes on from the checkpoint")
        else:
            initial = {name: array.copy() for name, array in self._initial.items()}
            replica.flip(initial, Committed(position=Position()))

    def took_up(self, layout: Layout, step: int, digest: str) -> None:
        self.presence.say(TookUp(generation=layout.generation, step=step, digest=digest))
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
        self._keeper.save(layout.generation, len(layout.seats), replica)
        self._checkpoints_saved += 1
        position = replica.position
        self._last_checkpoint_step = position.step
        self.presence.say(
            Saved(
                generation=layout.generation,
                step=position.step,
                epoch=position.epoch,
                digest=replica.digest(),
                consumed=position.consumed,
                consumed_hash=position.consumed_hash,
                epochs=replica.committed.epochs,
            )
        )

    def say_goodbye(self, outcome: Outcome) -> None:
        self._say(self._position.step, _LAST_WORDS[outcome])

    def rest(self, layouts: Layouts) -> None:
        """Take the pause that the job asks for after each step."""
        until = time.monotonic() + self._settings.sleep_sec
        while (left := until - time.monotonic()) > 0:
            layouts.attend()
            time.sleep(min(left, REST_PIECE_SECONDS))

    def _beat(self, stopping: bool) -> Beat:  # noqa: FBT001  what a beat says of itself
        position, means = self._position, self._means
        return Beat(
            step=position.step,
            total_steps=self._course.total_steps,
            epoch=position.epoch,
            shard_idx=0,
            line_idx=position.line_idx,
            loss=means.loss if means is not None and math.isfinite(means.loss) else None,
            metrics={} if means is None else dict(means.metrics),
            checkpoints_saved=self._checkpoints_saved,
            last_checkpoint_step=self._last_checkpoint_step,
            stopping=stopping,
        )

    def _say(self, step: int, words: str) -> None:
        total = self._course.total_steps
        print(f"rank {self._settings.rank}  step {step}/{total}  {words}", flush=True)


def main(settings: RankSettings, working_dir: Path) -> int:
    """Train with whomever the layouts name, to the end or until asked to stop."""
    program = _program_of(settings, working_dir)
    drawer = Drawer(find_shards(settings.dataset_dir))
    if drawer.totals.lines == 0:
        raise DatasetEmpty(settings.dataset_dir, "its shards hold no line")
    course = Course(
        totals=drawer.totals,
        batch_size=settings.batch_size,
        virtual_shards=settings.virtual_shards,
        epochs=settings.epochs,
        seed=settings.seed,
        checkpoint_every=settings.checkpoint_every,
    )
    initial = program.initial(settings.seed)
    shares = Shares(program, course, drawer, initial)
    reporter = Reporter(settings, course, initial)
    reporter.presence.start()
    layouts = _layouts_of(settings, reporter)
    trainer = Trainer(
        shares=shares,
        replica=Replica(initial),
        layouts=layouts,
        meeting=_meeting_of(settings, shares, layouts),
        witness=reporter,
    )
    reporter.presence.say(Ready(fingerprint="", backend=settings.backend, port=0))
    outcome = trainer.run()
    reporter.say_goodbye(outcome)
    return 0


def _layouts_of(settings: RankSettings, reporter: Reporter) -> Layouts:
    """Return the agent's layouts, or where there is no agent the one of a rank by itself."""
    if settings.agent_fd is None:
        return Alone(settings.rank, lambda: reporter.presence.is_stopping)
    channel = socket.socket(fileno=os.dup(settings.agent_fd))
    return AnnouncedLayouts(channel, lambda: reporter.presence.is_stopping)


def _meeting_of(settings: RankSettings, shares: Shares, layouts: Layouts) -> Meeting:
    leaves = shares.course.virtual_shards
    if settings.agent_fd is None:
        return SimulatedMeeting(settings.rank, np.zeros((leaves, shares.elements), np.float32))
    geometry = Geometry(slot_count=leaves, elements=shares.elements)
    return SharedMemoryMeeting(settings.rank, geometry, layouts)


def _program_of(settings: RankSettings, working_dir: Path) -> Program:
    if settings.program is None:
        return Classifier(settings.dataset_dir)
    return load(settings.program, working_dir, dataset_dir=settings.dataset_dir)
