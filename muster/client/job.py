"""`Job`: one job of a client, and its logs without gap or repetition."""

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Self

from httpx_sse import EventSource

from muster.client import job_path
from muster.client.errors import Busy, ClientError, Replaced, Unreachable, WaitTimedOut
from muster.client.http import (
    LONGEST_PAUSE_SECONDS,
    TIMEOUT_SECONDS,
    ApiResponse,
    Connection,
    Query,
    pauses,
    retry_after,
)
from muster.client.progress import Progress
from muster.contracts.views.history import (
    AttemptList,
    AttemptView,
    AuditView,
    EventList,
    EventView,
    Fault,
    FaultView,
    LogLineView,
    LogTail,
    SeriesList,
)
from muster.contracts.views.job import Deleted, JobView, MemberList, SummaryView

POLL_SECONDS: Final = 0.5  # between two updates of the progress line

WAIT_SECONDS: Final = 30.0
"""How long one request waits for a status; the server allows up to a minute."""

PAUSE_SECONDS: Final = 0.1
"""Before the next request: a server that is shutting down answers at once."""

ENDING_SECONDS: Final = 3600.0
"""For a response that waits until jobs have ended; they choose their own grace period."""

RECONNECT_SECONDS: Final = 60.0
"""The least time without a connection that a log stream bears; an upgrade of the server takes
less."""

CHECKPOINT: Final = "checkpoint"
"""What `Job.wait` waits for until a requested checkpoint is durable."""

_NAMED: Final = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)


class Job:
    """A job. `view` is its state as of the last response.

    Every method raises a `ClientError`.
    """

    def __init__(self, connection: Connection, view: JobView) -> None:
        self._connection = connection
        self.view = view

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.status}>"

    @property
    def id(self) -> str:
        return self.view.job_id

    @property
    def status(self) -> str:
        return self.view.status

    @property
    def is_terminal(self) -> bool:
        """Whether it is over."""
        return self.view.is_terminal

    def refresh(self) -> Self:
        """Update `view`."""
        return self._update(self._connection.ask("GET", self._path()))

    def summary(self) -> SummaryView:
        """Return its progress, with every rank."""
        return self._summary(math.inf)

    def workers(self) -> MemberList:
        """Return the past and present workers of its pool."""
        return self._get("workers").read_as(MemberList)

    def audit(self, last: int = 1000) -> AuditView:
        """Return the evidence of its reads, with the last epochs and checkpoints."""
        return self._get("audit", limit=last).read_as(AuditView)

    def series(self, *names: str, points: int = 500) -> SeriesList:
        """Return loss, throughput and metrics by step and time, or only those of `names`.

        Each has about `points` points at most.
        """
        query: Query = {"names": names, "points": points}
        return self._connection.ask("GET", self._path("series"), query=query).read_as(SeriesList)

    def events(self, limit: int = 1000, *, after: int | None = None) -> list[EventView]:
        """Return its last `limit` events, oldest first, or the first ones after id `after`."""
        return self._get("events", limit=limit, after=after).read_as(EventList).events

    def attempts(self) -> Iterator[AttemptView]:
        """Yield every attempt of its ranks, newest first."""
        page: str | None = self._path("attempts")
        while page:
            answer = self._connection.ask("GET", page)
            yield from answer.read_as(AttemptList).attempts
            page = answer.next_page

    def follow_events(self, limit: int = 1000) -> Iterator[EventView]:
        """Yield its last `limit` events, oldest first, and then new ones until it is over."""
        last: int | None = None
        is_over = self.refresh().is_terminal
        while True:
            # Read after the job, so that they include its end.
            came = self.events(limit if last is None else 1000, after=last)
            for event in came:
                yield event
                last = event.event_id
            if is_over and not came:
                return
            self._connection.sleep(PAUSE_SECONDS)
            is_over = self._await("terminal", POLL_SECONDS)

    def logs(
        self,
        rank: int | None = None,
        tail: int | None = None,
        *,
        since: datetime | None = None,
        grep: str | None = None,
        follow: bool = False,
    ) -> Iterator[LogLineView]:
        """Yield the lines of one rank or of all, those that contain `grep` if it is given.

        Without `follow`: the last `tail` lines (None: the server's default) written at `since` or
        later. With `follow`: the last `tail` complete lines (None: all), and then new ones until
        the job is over, without gap or repetition, also if the connection is lost or the server
        restarts. Raises `ValueError` for `since` with `follow`.
        """
        if not follow:
            moment = None if since is None else since.astimezone(UTC).isoformat()
            found = self._get("logs", rank=rank, tail=tail, since=moment, grep=grep)
            return iter(found.read_as(LogTail).lines)
        if since is not None:
            raise ValueError("a stream carries no times: use `tail`, or leave out `follow`")
        lines = follow_logs(self._connection, self._path("logs", "stream"), rank, tail)
        return (line for line in lines if grep in line.line) if grep else lines

    def wait(
        self,
        until: str = "terminal",
        timeout_seconds: float | None = None,
        *,
        progress: bool = False,
    ) -> Self:
        """Wait until the job has the status `until` (case does not matter), or is over.

        "checkpoint" waits until the checkpoint that was requested is durable. With `progress`, draw
        its progress on standard error. Raises `WaitTimedOut` after `timeout_seconds`; the job goes
        on.
        """
        until = until if until in {"terminal", CHECKPOINT} else until.upper()
        if not progress:
            # The server waits for statuses only.
            poll_seconds = POLL_SECONDS if until == CHECKPOINT else WAIT_SECONDS
            return self._wait(until, timeout_seconds, poll_seconds, lambda _: None)
        shown = Progress(sys.stderr, self._connection.monotonic)
        try:
            self._wait(
                until,
                timeout_seconds,
                POLL_SECONDS,
                lambda deadline: shown.draw(self._summary(deadline)),
            )
            with suppress(ClientError):  # the wait has succeeded
                shown.draw(self._summary(self._connection.monotonic()), is_last=True)
        finally:
            shown.close()
        return self

    def _wait(
        self,
        until: str,
        timeout_seconds: float | None,
        poll_seconds: float,
        on_poll: Callable[[float], None],
    ) -> Self:
        """Do the work of `wait`, and call `on_poll` after each request."""
        patience_seconds = math.inf if timeout_seconds is None else timeout_seconds
        deadline = self._connection.monotonic() + patience_seconds
        try:
            while not self._await(until, min(poll_seconds, self._left(deadline)), deadline):
                on_poll(deadline)
                if self._left(deadline) <= 0:
                    raise WaitTimedOut(self.id, self.status, patience_seconds)
                self._connection.sleep(PAUSE_SECONDS)
        except (Unreachable, Busy) as lost:
            if self._left(deadline) > max(LONGEST_PAUSE_SECONDS, retry_after(lost)):
                raise  # the retries ended before the deadline
            self._connection.sleep(max(0.0, self._left(deadline)))
            raise WaitTimedOut(self.id, self.status, patience_seconds, lost) from None
        return self

    def _left(self, deadline: float) -> float:
        return deadline - self._connection.monotonic()

    def _await(self, until: str, seconds: float, deadline: float = math.inf) -> bool:
        """Update `view` once the status is reached or the time is over; return if it is reached."""
        is_checkpoint = until == CHECKPOINT
        status = "terminal" if is_checkpoint else until
        query: Query = {"until": status, "wait": max(0.0, seconds)}
        answer = self._connection.ask(
            "GET",
            self._path(),
            query=query,
            read_seconds=seconds + TIMEOUT_SECONDS,
            deadline=deadline,
        )
        is_over = self._update(answer).is_terminal
        is_durable = is_checkpoint and not self.view.checkpoint_requested
        return is_over or is_durable or self.status == until

    def _summary(self, deadline: float) -> SummaryView:
        answer = self._connection.ask("GET", self._path("summary"), deadline=deadline)
        return answer.read_as(SummaryView)

    def scale(self, world_size: int) -> Self:
        """Request another number of ranks, without a restart; synchronous jobs only."""
        body = {"world_size": world_size}
        return self._update(self._connection.ask("PATCH", self._path(), body=body))

    def pause(self) -> Self:
        """Request a pause: the ranks stay and take no step; synchronous jobs only."""
        return self._order("pause")

    def resume(self) -> Self:
        """Request the end of a pause."""
        return self._order("resume")

    def checkpoint(self) -> Self:
        """Request a checkpoint now, see `wait`; running synchronous jobs only."""
        return self._order(CHECKPOINT)

    def inject_fault(
        self, fault: Fault = "kill", *, rank: int | None = None, host: str | None = None
    ) -> FaultView:
        """Strike a rank, or kill all ranks of a host and their agent, to test the recovery."""
        body = _present(fault=fault, rank=rank, host=host)
        return self._connection.ask("POST", self._path("faults"), body=body).read_as(FaultView)

    def stop(self, grace_seconds: float | None = None, reason: str | None = None) -> Self:
        """Request a last checkpoint and the end; a job that is over stays as it is.

        `grace_seconds` is the time from SIGTERM to SIGKILL (None: the job's own). `reason` goes
        into the job's events.
        """
        return self._order("stop", _present(grace_seconds=grace_seconds, reason=reason))

    def delete(
        self,
        *,
        delete_logs: bool = True,
        stop_first: bool = False,
        force: bool = False,
        delete_checkpoints: bool | None = None,
    ) -> Deleted:
        """Delete its rows and logs; it must be over unless `stop_first` or `force` is set.

        `stop_first` stops it before. `force` kills it, and deletes its checkpoints, too, unless
        `delete_checkpoints` is False.
        """
        query = {
            "delete_logs": delete_logs,
            "stop_first": stop_first,
            "force": force,
            "delete_checkpoints": delete_checkpoints,
        }
        answer = self._connection.ask(
            "DELETE", self._path(), query=query, read_seconds=ENDING_SECONDS
        )
        return answer.read_as(Deleted)

    def _get(self, what: str, **query: float | str | None) -> ApiResponse:
        return self._connection.ask("GET", self._path(what), query=query)

    def _order(self, verb: str, body: object = None) -> Self:
        return self._update(self._connection.ask("POST", self._path(verb), body=body))

    def _update(self, answer: ApiResponse) -> Self:
        view = answer.read_as(JobView)
        if view.job_uid != self.view.job_uid:
            raise Replaced(self.id)
        self.view = view
        return self

    def _path(self, *rest: str) -> str:
        return job_path(self.id, *rest)


def _present(**given: float | str | None) -> dict[str, int | float | str]:
    return {name: value for name, value in given.items() if value is not None}


def follow_logs(
    connection: Connection, path: str, rank: int | None, tail: int | None
) -> Iterator[LogLineView]:
    """Yield the lines of one rank or of all until the job is over: the last `tail` first, or all.

    Each event of the stream has an id, from which the server resumes after a lost connection, and
    is delivered whole or not at all. Raises `Unreachable` or `Busy` after a minute without a
    connection, or the time for which `connection` repeats a request if that is longer, or if the
    server asks not to be called for longer than that.
    """
    query = _present(rank=rank, tail=tail)
    seen: str | None = None
    lost_at: float | None = None
    waits = pauses()
    while True:
        headers = {"Accept": "text/event-stream"}
        if seen is not None:
            headers["Last-Event-ID"] = seen
            query.pop("tail", None)
        wait_seconds = 0.0
        try:
            with connection.stream(path, query, headers) as response:
                lost_at, waits = None, pauses()
                if response.status_code == HTTPStatus.NO_CONTENT:
                    return
                for event in EventSource(response).iter_sse():
                    lost_at, waits = None, pauses()
                    # A ping repeats the last id; the first event only says where to resume.
                    has_lines = event.event == "message" and event.id != seen and not event.retry
                    seen = event.id or seen
                    if event.event == "end":
                        return
                    if has_lines:
                        yield from _log_lines(event.data, rank)
        except (Unreachable, Busy) as error:
            now, wait_seconds = connection.monotonic(), retry_after(error)
            lost_at = now if lost_at is None else lost_at
            patience_seconds = max(RECONNECT_SECONDS, connection.retry_seconds)
            if now + wait_seconds > lost_at + patience_seconds:
                raise
        connection.sleep(max(wait_seconds, next(waits)))


def _log_lines(data: str, rank: int | None) -> Iterator[LogLineView]:
    for text in data.split("\n"):
        named = _NAMED.fullmatch(text) if rank is None else None
        number, line = (int(named[1]), named[2]) if named else (rank or 0, text)
        yield LogLineView(rank=number, line=line)
