"""Starts and ends all parts of a chaos run in the right order: services, jobs and observers."""

import time
from types import TracebackType
from typing import Any, Self

from stress.chaos.decoys import Decoys
from stress.chaos.jobs import Workload
from stress.chaos.logs import NumberedLines
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
        self._reader = CheckpointWatch(installation.checkpoint_dir)
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
        awaited(lambda: not self.installation.marks(), PARTING_SECONDS)
        left = [f"pid {record.pid} of {mark}" for record, mark in self.installation.marks()]
        until = time.monotonic() + STREAM_SECONDS
        for follower in self.followers.values():
            follower.wait(max(0.0, until - time.monotonic()))
        self.reading = self._reader.end()
        return left

    def _short_jobs_are_over(self) -> bool:
        return all(self.installation.job(it)["is_terminal"] for it in self.workload.errands[-100:])
