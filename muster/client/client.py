"""`Client`: the requests of the API as methods."""

import difflib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

import httpx

from muster.client.errors import Ambiguous, NotFound
from muster.client.http import (
    RETRY_SECONDS,
    TIMEOUT_SECONDS,
    ApiResponse,
    Connection,
    Query,
    tls_context,
)
from muster.client.job import ENDING_SECONDS, Job
from muster.contracts.job.field_types import JOB_ID_PATTERN, RESERVED_IDS
from muster.contracts.location import expand_home
from muster.contracts.settings.services import CA_FILE, TOKEN, api_url
from muster.contracts.views.job import JobList, JobPlan, JobView, LeaderboardView, Purged
from muster.contracts.views.service import EngineList, Health, HostList, ProblemView, Version

LATEST: Final = "@latest"  # stands for the job that was submitted last

PAGE_SIZE: Final = 1000
AMBIGUOUS_IDS_SHOWN: Final = 5


class Client:
    """One API. Close it, or use it in a ``with`` statement.

    Questions and submissions are repeated for `retry_seconds` while the API does not answer. Other
    requests are sent at most once. Every method raises a `ClientError`.
    """

    def __init__(  # noqa: PLR0913  three are for tests only
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Connect to `url`, or MUSTER_URL, or MUSTER_PORT of this machine (`InvalidEnvironment`).

        Without `token`, MUSTER_TOKEN is used; on the API's own machine the same user needs none.
        `ca_file`, or MUSTER_CA_FILE, holds the certificates (PEM) to trust in place of the
        system's. `monotonic`, `sleep` and `transport` are for tests.
        """
        self.url = api_url(os.environ if url is None else {"MUSTER_URL": url})
        if transport is None:
            trusted = os.fspath(ca_file) if ca_file else expand_home(os.environ.get(CA_FILE, ""))
            context = tls_context(self.url, trusted or None)
            transport = httpx.HTTPTransport(verify=context, trust_env=False)
        self.connection = Connection(
            self.url,
            token or os.environ.get(TOKEN),
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
            monotonic=monotonic,
            sleep=sleep,
            transport=transport,
        )
        """For any path of the API that has no method here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()

    def submit(self, spec: Mapping[str, Any] | None = None, /, **fields: Any) -> Job:  # noqa: ANN401  any JSON
        """Submit a job: the fields of ``POST /jobs``, as a mapping, by name, or both.

        The job is durable on return, and is created once however often the request is repeated.
        The server resolves relative paths; use `os.path.abspath` for your own.
        """
        return Job(self.connection, self.order({**(spec or {}), **fields}).read_as(JobView))

    def order(self, body: Mapping[str, Any]) -> ApiResponse:
        """Submit a job, and return the API's response.

        Raises `Unconfirmed` if the job may have been accepted, and no answer came in time.
        """
        return self.connection.ask("POST", "/jobs", body=body, key=uuid.uuid4().hex)

    def plan(self, spec: Mapping[str, Any] | None = None, /, **fields: Any) -> JobPlan:  # noqa: ANN401  any JSON
        """Return what `submit` would do, or raise its error; nothing is stored."""
        body = {**(spec or {}), **fields}
        answer = self.connection.ask(
            "POST", "/jobs", query={"dry_run": True}, body=body, is_repeatable=True
        )
        return answer.read_as(JobPlan)

    def jobs(
        self, status: str | Sequence[str] | None = None, limit: int | None = None
    ) -> Iterator[Job]:
        """Yield jobs, newest first: with `status` or one of several, at most `limit`."""
        statuses = [status] if isinstance(status, str) else status
        if statuses is not None and not statuses:
            return
        page = PAGE_SIZE if limit is None else max(1, min(PAGE_SIZE, limit))
        query: Query = {"status": list(statuses or []), "limit": page}
        for view in islice(self._views(query), limit):
            yield Job(self.connection, view)

    def count(self, status: str) -> int:
        """Return how many jobs have this status."""
        answer = self.connection.ask("GET", "/jobs", query={"status": status, "limit": 1})
        return answer.total or 0

    def hosts(self) -> HostList:
        """Return the hosts on which ranks may run, with what runs there."""
        return self.connection.ask("GET", "/hosts").read_as(HostList)

    def engines(self) -> EngineList:
        """Return what may start the agents of jobs, and what is missing."""
        return self.connection.ask("GET", "/engines").read_as(EngineList)

    def leaderboard(self, sweep: str | None = None) -> LeaderboardView:
        """Compare the jobs with this label `sweep`; None: with the only one, if there is one."""
        answer = self.connection.ask("GET", "/leaderboard", query={"sweep": sweep})
        return answer.read_as(LeaderboardView)

    def job(self, word: str) -> Job:
        """Return the job with this id, name, or unique prefix of an id; ``@latest`` is the newest.

        Raises `NotFound` or `Ambiguous`.
        """
        found = self._named(word)
        if found is None:
            every = list(self._views({}))
            found = _only(word, [job for job in every if word and job.job_id.startswith(word)])
        if found is None:
            known = [name for job in every for name in (job.job_id, job.name) if name]
            near = difflib.get_close_matches(word, [*known, LATEST], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "muster ps lists them"
            raise _not_found(f"there is no job {word!r}: {hint}")
        return Job(self.connection, found)

    def named(self, word: str) -> Job:
        """Return the job with this id or name in full, or ``@latest``; for example to delete it.

        A prefix is not enough: a repeated deletion would hit the next job with that prefix. Raises
        `NotFound` or `Ambiguous`.
        """
        found = self._named(word)
        if found is None:
            near = self.job(word)
            raise _not_found(f"there is no job {word!r}: if {near.id} is meant, say all of it")
        return Job(self.connection, found)

    def job_of(self, view: JobView) -> Job:
        """Return the job of a view; a later job with the same id is not mistaken for it."""
        return Job(self.connection, view)

    def health(self) -> Health:
        """Return the state of the service and of what it depends on."""
        return self.connection.ask("GET", "/health").read_as(Health)

    def version(self) -> Version:
        """Return the version of the service."""
        return self.connection.ask("GET", "/version").read_as(Version)

    def purge(
        self,
        *,
        status: str | Sequence[str] | None = None,
        older_than_hours: float | None = None,
        delete_logs: bool = True,
        stop_running: bool = False,
        force: bool = False,
        delete_checkpoints: bool | None = None,
        dry_run: bool = False,
    ) -> Purged:
        """Delete every job that matches: all without a filter, none with an empty `status`.

        Jobs that are not over are skipped unless `stop_running` or `force` ends them; `force`
        deletes checkpoints, too, unless `delete_checkpoints` is False. With `dry_run`, only return
        which jobs would be deleted.
        """
        statuses = [status] if isinstance(status, str) else status
        if statuses is not None and not statuses:
            return Purged(matched=0, deleted=0, job_ids=[], skipped=[])
        query: Query = {
            "statuses": list(statuses or []),
            "older_than_hours": older_than_hours,
            "delete_logs": delete_logs,
            "stop_running": stop_running,
            "force": force,
            "delete_checkpoints": delete_checkpoints,
            "dry_run": dry_run,
        }
        answer = self.connection.ask(
            "POST", "/jobs/purge", query=query, read_seconds=ENDING_SECONDS
        )
        return answer.read_as(Purged)

    def _named(self, word: str) -> JobView | None:
        """Find a job by id, name or ``@latest``; an id goes before a name."""
        if word == LATEST:
            newest = self.connection.ask("GET", "/jobs", query={"limit": 1}).read_as(JobList).jobs
            if not newest:
                raise _not_found("there is no job yet: muster submit makes one")
            return newest[0]
        if re.fullmatch(JOB_ID_PATTERN, word) and word not in RESERVED_IDS:
            with suppress(NotFound):
                return self.connection.ask("GET", f"/jobs/{word}").read_as(JobView)
        return _only(word, list(self._views({"name": word})))

    def _views(self, query: Query) -> Iterator[JobView]:
        answer = self.connection.ask("GET", "/jobs", query=query)
        yield from answer.read_as(JobList).jobs
        while answer.next_page:
            answer = self.connection.ask("GET", answer.next_page)
            yield from answer.read_as(JobList).jobs


def _only(word: str, found: Sequence[JobView]) -> JobView | None:
    if len(found) > 1:
        raise Ambiguous(word, [job.job_id for job in found[:AMBIGUOUS_IDS_SHOWN]])
    return found[0] if found else None


def _not_found(detail: str) -> NotFound:
    return NotFound(
        ProblemView(
            status=HTTPStatus.NOT_FOUND,
            type="/problems/job-not-found",
            title="Job not found",
            detail=detail,
        )
    )
