"""Starts and ends all parts of a chaos run in the right order: services, jobs and observers."""

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stress.chaos.decoys import Decoys
from stress.chaos.jobs import Workload, checkpoints_of
from stress.chaos.observer import LeaseObserver, Observer
from stress.chaos.reader import CheckpointWatch
from stress.chaos.strikes import awaited
from stress.restarter import Restarter
from tests.support.installation import Installation
from tests.support.log_follower import LogFollower

LAST_SECONDS = 120.0
"""For all jobs to finish after the last fault: a backoff may take 30 s."""
PARTING_SECONDS = 2.0
"""No process of a job may run longer than this after all jobs have ended."""
STREAM_SECONDS = 10.0
"""For the log streams to end after their jobs."""


NUMBERED = re.compile(r"\[rank (\d+)\] line (\d+) of (\S+)")


class RunningServices:
    """Services with their restarters, jobs and observers."""

    def __init__(
        self,
        installation: Installation,
        observer: Observer,
        workload: Workload,
        leases: LeaseObserver,
        coordinators: int,
    ) -> None:
        self.installation = installation
        self.observer = observer
        self.workload = workload
        self.leases = leases
        self.api_restarter = Restarter(installation.api)
        several = [installation.coordinator, installation.standby][:coordinators]
        self._restarters = [self.api_restarter, *map(Restarter, several)]
        self.decoys = Decoys(installation.root)
        self.followers: dict[str, LogFollower] = {}
        self.printed: dict[str, NumberedLines] = {}
        self._reader = CheckpointWatch(checkpoints_of(installation))
        self.reading: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for restarter in self._restarters:
            restarter.start()
        self.leases.start()
        self.observer.start()
        self.workload.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.workload.finish()
        self.observer.end()
        self.leases.end()
        for restarter in self._restarters:
            restarter.end()
        if not self.reading:
            self._reader.end()
        self.decoys.end()

    def meet_new_jobs(self) -> None:
        """Follow the logs of new jobs, and start a decoy for each."""
        for training in self.workload.trainings[len(self.followers) :]:
            self._follow(training.job_id)
            self.decoys.stand_beside(training.uid)

    def _follow(self, job_id: str) -> None:
        printed = NumberedLines(job_id)
        follower = LogFollower(self.installation.url, job_id, printed.take)
        follower.start()
        self.followers[job_id], self.printed[job_id] = follower, printed

    def come_to_rest(self) -> list[str]:
        """Let all jobs finish; return the processes they leave behind."""
        self.workload.finish()
        self.meet_new_jobs()
        awaited(lambda: not self.workload.lively(), LAST_SECONDS)
        awaited(self._short_jobs_are_over, LAST_SECONDS)
        awaited(lambda: not self.installation.tagged(), PARTING_SECONDS)
        left = [f"pid {record.pid} of {tag}" for record, tag in self.installation.tagged()]
        until = time.monotonic() + STREAM_SECONDS
        for follower in self.followers.values():
            follower.wait(max(0.0, until - time.monotonic()))
        self.reading = self._reader.end()
        return left

    def _short_jobs_are_over(self) -> bool:
        return all(self.installation.job(it)["is_terminal"] for it in self.workload.errands[-100:])


class NumberedLines:
    """The numbered lines that one reader of a job's log stream received.

    At the end it must have every line that any rank wrote, once, and the lines of each process in
    the order in which they were written.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._numbers: dict[str, list[int]] = defaultdict(list)
        """Writer → its line numbers in order of arrival."""

    def take(self, lines: Sequence[str]) -> None:
        for line in lines:
            if found := NUMBERED.fullmatch(line):
                self._numbers[found[3]].append(int(found[2]))

    def faults(self, witnesses: Path) -> Iterator[str]:
        """Yield one sentence per gap, duplicate or reordering."""
        for who, numbers in self._numbers.items():
            if numbers != list(range(len(numbers))):
                yield f"lines of {who} are not in order, once each: {_around(numbers)}"
        for witness in witnesses.glob(f"{self._job_id}.*"):
            written = int.from_bytes(witness.read_bytes(), "little")
            found = len(self._numbers[witness.name])
            # The process may have been killed between the line and its counter.
            if found not in {written, written + 1}:
                yield f"{witness.name} wrote {written} lines, and {found} are in the log"


def _around(numbers: list[int]) -> str:
    wrong = next(place for place, number in enumerate(numbers) if place != number)
    return f"… {numbers[max(0, wrong - 3) : wrong + 4]} … at place {wrong}"
