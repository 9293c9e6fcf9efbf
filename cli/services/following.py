"""Follows the job of a `muster run` over HTTP, from its submission to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cli.services.terminal import ServiceWarnings, Terminal
from muster.client.errors import ClientError, Conflict, NotFound
from muster.contracts.errors import JobDiffers
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus
from muster.contracts.settings.paths import DataDir
from muster.contracts.views.job import JobView

if TYPE_CHECKING:
    from muster.client import Client, Job

POLL_SECONDS: Final = 0.05
POLLS_PER_REQUEST: Final = 4
"""Logs are files of this machine, so reading them is cheap."""

LEFT_OVER: Final = "/problems/checkpoints-left-over"


class Follower:
    """Submits one job and shows how it goes."""

    def __init__(self, job_id: JobId, spec: JobSpec, files: DataDir) -> None:
        """Create it before the services start: what a resumed job does then is new."""
        self.files = files
        self._job_files = files.job(job_id)
        self._body = msgspec.json.decode(msgspec.json.encode(spec)) | {
            "job_id": job_id,
            "working_dir": str(Path.cwd() / (spec.working_dir or "")),
        }
        self._terminal = Terminal(self._job_files)
        self._warnings = ServiceWarnings(files.services_log)
        self._began = datetime.now(UTC)
        self._last_event = 0
        self.job: Job | None = None
        self.is_over = threading.Event()
        """Set when no service works for the job any more."""

    def run(
        self,
        connect: Callable[[], Client],
        on_submitted: Callable[[], object],
        on_served: Callable[[], None],
    ) -> None:
        """Return once the job is over and everything was shown.

        `on_submitted` starts a coordinator; `on_served` is called once that has started the job.
        """
        job = self.job = self.submit(connect())
        on_submitted()
        for poll in count():
            # What a rank has printed comes before the event of its end.
            self._terminal.show_output()
            if poll % POLLS_PER_REQUEST == 0:
                self._show_events(job)
                self._warnings.show()
                if job.refresh().is_terminal:
                    break
                if job.status != JobStatus.QUEUED:
                    on_served()
            if self.is_over.wait(POLL_SECONDS):
                job.refresh()
                break
        self._terminal.show_rest()
        self._show_events(job)
        self.show_end()

    def kill_ranks(self) -> None:
        """End the ranks at once; called in another thread."""
        if self.job is not None:
            with suppress(ClientError):  # the job or the API has just ended
                self.job.stop(grace_seconds=0)

    def show_end(self) -> None:
        if self.job is not None:
            self._terminal.show_end(self.job.view)

    def submit(self, client: Client) -> Job:
        """Submit the job, unless an unfinished one of that id exists."""
        with suppress(NotFound):
            job = client.named(self._body["job_id"])
            if not job.is_terminal:
                self._refuse_other_spec(job.view)
                return job
            job.delete(delete_logs=False)
            self._terminal = Terminal(self._job_files)
        try:
            return client.submit(self._body)
        except Conflict as conflict:
            if conflict.type != LEFT_OVER:
                raise
        # By hand, the same id means: resume from its checkpoints.
        return client.submit(self._body, resume_from=self._body["job_id"])

    def _refuse_other_spec(self, stored: JobView) -> None:
        """Raise `JobDiffers` if the job has another spec; places chosen for it do not count."""
        body = self._body
        places = {name for name in ("dataset_dir", "checkpoint_dir") if body[name] is None}
        # A pause after each step has no effect on the result, so a resumed job may have another.
        kept = {*places, "job_id", "resume_from", "sleep_sec"}
        others = [name for name in body if name not in kept and body[name] != stored.spec[name]]
        if others:
            raise JobDiffers(stored.job_id, others)

    def _show_events(self, job: Job) -> None:
        while page := job.events(after=self._last_event):
            self._last_event = page[-1].event_id or self._last_event
            for event in page:
                if event.at >= self._began:  # an earlier run has shown the others
                    self._terminal.show_event(event)
