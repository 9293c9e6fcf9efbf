"""Spare processes of a synchronous job: they have loaded its program and wait to become a rank.

The coordinator does not know them. A start that it orders takes a spare process if there is one,
and a fork otherwise. Whatever happens to a spare process, the ranks train on.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from muster.contracts.messages.agent import StartRank
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.settings.environ import JOB_VARIABLES
from muster.contracts.settings.names import (
    ATTEMPT_VARIABLES,
    PROCESS_TAG,
    PROCESS_TAG_WIDTH,
    SPARE,
    SPARE_RANK,
)
from muster.program import InvalidProgram
from worker.ranks.log_index import LogIndex
from worker.ranks.rank import RankProcess
from worker.ranks.start import Starter

LOAD_SECONDS: Final = 120.0
"""A program that takes longer to load gets no spare process."""

QUICK_LOAD_SECONDS: Final = 2.0
"""Much shorter than any time that a new rank may be silent."""

OOM_SCORE: Final = Path("/proc/self/oom_score_adj")

LONGEST_PAUSE_SECONDS: Final = 60.0
"""Pauses after a spare process was killed start at one second, and double up to this."""


class _Start(NamedTuple):
    at: float
    log: Path
    times: Path


class SpareRanks:
    """The spare processes of one agent."""

    def __init__(
        self,
        assignment: AgentAssignment,
        starter: Starter,
        claim_oom_kill: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        """`warn` gets a sentence when there will be no more spare processes."""
        self._directory = Path(assignment.job_root)
        for file in self._directory.glob("spare_*"):  # of an agent that was killed
            file.unlink(missing_ok=True)
        self._prefix = f"{assignment.job_uid}/{SPARE_RANK}/"
        self._count = assignment.spare_ranks
        self._starter = starter
        self._claim_oom_kill = claim_oom_kill
        self._warn = warn
        self._order: StartRank | None = None
        """What the orders of all attempts have in common."""
        self._spares: dict[RankProcess, _Start] = {}
        self._started = self._kills = 0
        self._loads_quickly = False
        self._not_before = 0.0

    @property
    def pids(self) -> set[int]:
        return {spare.pid for spare in self._spares}

    def take(self, order: StartRank, log: Path, times: Path) -> RankProcess | None:
        """Return a spare process that has become this attempt, with its log; None without one.

        One that is still loading reads its order when it has loaded, and is silent until then. So
        it is ended instead, unless another one has loaded the program quickly. A script is as
        silent in a new process.
        """
        names = order.environment.keys() - ATTEMPT_VARIABLES
        common = {name: order.environment[name] for name in names}
        wanted = replace(order, rank=SPARE_RANK, attempt=0, environment=common)
        if wanted != self._order:  # at first, or a secret has changed
            self._order = wanted
            self.end_all()
        may_load = self._loads_quickly or bool(common.get(JOB_VARIABLES["command"]))
        for spare in sorted(self._spares, key=lambda spare: not spare.is_ready):
            if spare.process.has_exited() or not (spare.is_ready or may_load):
                continue
            log.parent.mkdir(parents=True, exist_ok=True)
            # First, so that it runs as soon as it gets the order.
            _set_priority(spare, os.SCHED_OTHER, OOM_SCORE.read_text())
            if not spare.become(order):
                self._end(spare)
                continue
            start = self._spares.pop(spare)
            start.log.rename(log)  # what the program has started at its import writes there
            start.times.rename(times)
            self._kills = 0
            return spare
        self.end_all()
        return None

    def prepare(self) -> None:
        """Start another spare process if one is missing, one at a time."""
        now = time.monotonic()
        is_missing = len(self._spares) < self._count and now >= self._not_before
        is_loading = not all(spare.is_ready for spare in self._spares)
        if self._order is None or not is_missing or is_loading:
            return
        # As long as any tag, so that it can be overwritten in place.
        tag = self._prefix + str(self._started).zfill(PROCESS_TAG_WIDTH - len(self._prefix))
        own = {SPARE: "1", PROCESS_TAG: tag}
        order = replace(self._order, environment=self._order.environment | own)
        self._started += 1
        files = [self._directory / f"spare_{self._started}.{kind}" for kind in ("log", "times")]
        with ExitStack() as opened:
            try:
                log = opened.enter_context(closing(LogIndex(*files)))
                spare = RankProcess.start(order, log, self._starter)
            except (OSError, InvalidProgram):
                self._pause()
                return
            opened.pop_all()
            self._spares[spare] = _Start(now, *files)
            # SCHED_BATCH gives way to ranks that wake up. Unlike a nice value it can be left
            # without privileges. If memory runs out, the spare process is the first to go.
            _set_priority(spare, os.SCHED_BATCH, "1000")

    def settle(self) -> None:
        """Clean up after those that have ended, and end what takes too long to load."""
        for spare, start in list(self._spares.items()):
            if spare not in self._spares:  # the end of another one has ended all
                continue
            if spare.process.has_exited():
                by = spare.process.exit_status().signal
                lines = spare.log.last_lines() if spare.log is not None else ()
                self._end(spare)
                if by is None:
                    self._give_up(*lines[-1:])
                elif by == signal.SIGKILL and self._claim_oom_kill():
                    self._give_up("there is too little memory")
                else:
                    self._pause()
            elif spare.is_ready:
                self._loads_quickly |= time.monotonic() < start.at + QUICK_LOAD_SECONDS
            elif time.monotonic() > start.at + LOAD_SECONDS:
                self._give_up(f"the program takes more than {LOAD_SECONDS:g} s to load")

    def _pause(self) -> None:
        self._not_before = time.monotonic() + min(2**self._kills, LONGEST_PAUSE_SECONDS)
        self._kills += 1

    def _give_up(self, *reason: str) -> None:
        self._count = 0
        self.end_all()
        why = "".join(f" ({each})" for each in reason)
        self._warn(f"spare processes are off{why}: new ranks load the program when they start")

    def end_all(self) -> None:
        """End all spare processes, and remove their files."""
        for spare in list(self._spares):
            self._end(spare)

    def _end(self, spare: RankProcess) -> None:
        _, log, times = self._spares.pop(spare)
        spare.contain()
        spare.release()
        log.unlink(missing_ok=True)
        times.unlink(missing_ok=True)


def _set_priority(spare: RankProcess, policy: int, oom_score: str) -> None:
    with suppress(OSError):  # it has exited, or a container forbids it
        os.sched_setscheduler(spare.pid, policy, os.sched_param(0))
        Path(f"/proc/{spare.pid}/oom_score_adj").write_text(oom_score)
