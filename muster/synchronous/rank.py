"""One rank of a synchronous job: the program, its data, its peers, its checkpoints, wired."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from muster.collectives.arena import Geometry
from muster.contracts.environ import RankSettings
from muster.contracts.messages import Ready
from muster.contracts.spec import GROUP_LIMIT
from muster.datasets.drawing import Drawer
from muster.datasets.errors import DatasetEmpty
from muster.datasets.listing import find_shards
from muster.line import Line
from muster.loading import load, their_errors
from muster.program import InvalidProgram, Program
from muster.programs.classifier import Classifier
from muster.synchronous.course import Course
from muster.synchronous.layouts import Alone, AnnouncedLayouts, Layouts
from muster.synchronous.meeting import LonelyMeeting, Meeting, SharedMemoryMeeting, TcpMeeting
from muster.synchronous.replay import Replay
from muster.synchronous.replica import Replica
from muster.synchronous.reporter import Reporter
from muster.synchronous.shares import Shares
from muster.synchronous.trainer import Trainer
from muster.voice import Voice


def main(settings: RankSettings, working_dir: Path, voice: Voice) -> int:
    """Train with whomever the layouts name, to the end or until asked to stop."""
    reporter = Reporter(settings, voice)
    reporter.presence.start()
    with reporter.work:
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
    with reporter.work, their_errors("initial() of the program failed", working_dir):
        initial = program.initial(settings.seed)
    shares = Shares(program, course, drawer, initial, reporter.work)
    reporter.expect(initial, course)
    _refuse_closed(voice.line)
    layouts = _layouts_of(settings, voice.line, reporter)
    meeting = _meeting_of(settings, shares, layouts)
    trainer = Trainer(
        shares=shares,
        replay=Replay(shares, settings.replay_every),
        replica=Replica(initial),
        layouts=layouts,
        meeting=meeting,
        witness=reporter,
    )
    reporter.presence.say(Ready(port=meeting.port))
    with _refusing_closed(voice.line):
        outcome = trainer.run()
    reporter.say_goodbye(outcome)
    return 0


@contextmanager
def _refusing_closed(line: Line) -> Iterator[None]:
    """Turn what follows from a program that has closed our descriptors into `InvalidProgram`."""
    try:
        yield
    except OSError:
        _refuse_closed(line)
        raise


def _refuse_closed(line: Line) -> None:
    if line.is_closed:
        raise InvalidProgram(
            "the program has closed files and sockets that Muster needs: let it close only what it "
            "has opened itself (look for os.closerange and os.close), and submit the job again"
        )


def _layouts_of(settings: RankSettings, line: Line, reporter: Reporter) -> Layouts:
    """Return the agent's layouts, or where there is no agent the one of a rank by itself."""
    if settings.agent_fd is None:
        return Alone(settings.rank, lambda: reporter.presence.is_stopping)
    return AnnouncedLayouts(line, lambda: reporter.presence.is_stopping)


def _meeting_of(settings: RankSettings, shares: Shares, layouts: Layouts) -> Meeting:
    leaves = shares.course.virtual_shards
    if settings.agent_fd is None:
        return LonelyMeeting(np.zeros((leaves, shares.elements), np.float32))
    if settings.backend == "tcp":
        slots = np.zeros((leaves, shares.elements), np.float32)
        return TcpMeeting(settings.rank, slots, layouts)
    geometry = Geometry(slot_count=leaves, elements=shares.elements, places=GROUP_LIMIT)
    return SharedMemoryMeeting(settings.rank, geometry, layouts)


def _program_of(settings: RankSettings, working_dir: Path) -> Program:
    if settings.program is None:
        return Classifier(settings.dataset_dir)
    return load(settings.program, working_dir, dataset_dir=settings.dataset_dir)
