"""The API's verbs. What it cannot do is an error whose message is a sentence."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

import httpx

from muster.client.connection import TIMEOUT_SECONDS, Answer, Connection
from muster.client.finding import find, find_named, pages
from muster.client.job import ENDING_SECONDS, Job
from muster.client.trust import trust
from muster.client.views import Health, JobPlan, JobView, Purged, Version
from muster.contracts.environ import CA_FILE, TOKEN, api_url

PAGE: Final = 1000
"""Most jobs of one answer."""


class Client:
    """One API. It can be closed, and is by ``with``.

    Questions, and submissions, are asked again for `retry_seconds` while nobody answers: 10, or 2
    where nobody listens and nobody was met there yet, if it is not said. Anything else is done at
    most once. Every method raises `ClientError`, or what stands below it.
    """

    def __init__(  # noqa: PLR0913  some are for tests only
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry_seconds: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Without `url`, MUSTER_URL holds, else MUSTER_PORT of this machine (`InvalidEnvironment`).

        Without `token`, MUSTER_TOKEN; on the API's own machine the same user needs none. Without
        `ca_file`, MUSTER_CA_FILE: the certificates to trust (PEM) in place of the system's, for an
        API with one of its own. `monotonic`, `sleep` and `transport` are for tests.
        """
        self.url = api_url(os.environ if url is None else {"MUSTER_URL": url})
        self.connection = Connection(
            self.url,
            token or os.environ.get(TOKEN),
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
            monotonic=monotonic,
            sleep=sleep,
            transport=transport or _transport(self.url, ca_file),
        )
        """For what has no verb here: any path of the API."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self.connection.close()

    def submit(self, spec: Mapping[str, Any] | None = None, /, **fields: Any) -> Job:  # noqa: ANN401  as JSON
        """Submit a job: the fields of ``POST /jobs``, as a mapping, by name, or both.

        It is durable when this returns, and exists once however often the request was repeated.
        Relative paths are the server's: say `os.path.abspath` where you mean your own.
        """
        return Job(self.connection, self.order({**(spec or {}), **fields}).read_as(JobView))

    def order(self, body: Mapping[str, Any]) -> Answer:
        """Submit a job, and return the API's own answer: that it is there, and how.

        Raises `Unconfirmed` if it may have been accepted, and nobody says so in time.
        """
        return self.connection.ask("POST", "/jobs", body=body, key=uuid.uuid4().hex)

    def plan(self, spec: Mapping[str, Any] | None = None, /, **fields: Any) -> JobPlan:  # noqa: ANN401  as JSON
        """Return what would become of a job, were it submitted; nothing is stored.

        What `submit` would refuse is refused here.
        """
        body = {**(spec or {}), **fields}
        answer = self.connection.ask(
            "POST", "/jobs", query={"dry_run": True}, body=body, is_repeatable=True
        )
        return answer.read_as(JobPlan)

    def jobs(
        self, status: str | Sequence[str] | None = None, limit: int | None = None
    ) -> Iterator[Job]:
        """Yield jobs, newest first: those with `status` or one of several, at most `limit`."""
        statuses = _several(status)
        if statuses == []:
            return
        most = PAGE if limit is None else max(1, min(PAGE, limit))
        for view in islice(
            pages(self.connection, {"status": statuses or [], "limit": most}), limit
        ):
            yield Job(self.connection, view)

    def count(self, status: str) -> int:
        """Return how many jobs have this status."""
        answer = self.connection.ask("GET", "/jobs", query={"status": status, "limit": 1})
        return answer.total or 0

    def job(self, word: str) -> Job:
        """Return the job of an id, a unique prefix of one, a name, or ``@latest``.

        Raises `NotFound` or `Ambiguous`.
        """
        return Job(self.connection, find(self.connection, word))

    def named(self, word: str) -> Job:
        """Return the job whose id or name this is in full, or ``@latest``: to delete it, say.

        Raises `NotFound` or `Ambiguous`.
        """
        return Job(self.connection, find_named(self.connection, word))

    def job_of(self, view: JobView) -> Job:
        """Return the job of a view that one has, and no other of its id."""
        return Job(self.connection, view)

    def health(self) -> Health:
        """Return whether the service has everything that it needs."""
        return self.connection.ask("GET", "/health").read_as(Health)

    def version(self) -> Version:
        """Return which service answers."""
        return self.connection.ask("GET", "/version").read_as(Version)

    def purge(
        self,
        *,
        status: str | Sequence[str] | None = None,
        older_than_hours: float | None = None,
        delete_logs: bool = True,
        stop_running: bool = False,
        force: bool = False,
        dry_run: bool = False,
    ) -> Purged:
        """Delete every job that matches; without a filter all do, with an empty `status` none.

        What runs is skipped unless `stop_running` or `force` ends it; `force` deletes checkpoints,
        too. With `dry_run` it is only said which jobs that would be.
        """
        statuses = _several(status)
        if statuses == []:
            return Purged(matched=0, deleted=0, job_ids=[], skipped=[])
        query: dict[str, Any] = {
            "statuses": statuses or [],
            "delete_logs": delete_logs,
            "stop_running": stop_running,
            "force": force,
            "dry_run": dry_run,
        }
        if older_than_hours is not None:
            query["older_than_hours"] = older_than_hours
        answer = self.connection.ask(
            "POST", "/jobs/purge", query=query, read_seconds=ENDING_SECONDS
        )
        return answer.read_as(Purged)


def _several(status: str | Sequence[str] | None) -> list[str] | None:
    """Return the statuses that are asked for; None for whatever it is, an empty list for none."""
    if status is None:
        return None
    return [status] if isinstance(status, str) else list(status)


def _transport(url: str, ca_file: str | os.PathLike[str] | None) -> httpx.HTTPTransport:
    trusted = os.fspath(ca_file) if ca_file else os.environ.get(CA_FILE)
    return httpx.HTTPTransport(verify=trust(url, trusted or None), trust_env=False)
