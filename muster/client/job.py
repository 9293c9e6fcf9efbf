"""One job, as a script holds it."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Self

from muster.client.connection import (
    LONGEST_PAUSE_SECONDS,
    TIMEOUT_SECONDS,
    Answer,
    Connection,
    Query,
)
from muster.client.errors import Busy, ClientError, Replaced, Unreachable, WaitTimedOut
from muster.client.following import follow
from muster.client.news import news
from muster.client.outcomes import retry_after
from muster.client.paths import path_of
from muster.client.progress import Progress
from muster.client.views import (
    AuditView,
    Deleted,
    EventList,
    EventView,
    IncarnationList,
    IncarnationView,
    JobView,
    LogLineView,
    LogTail,
    MemberList,
    SummaryView,
)

LOOK_SECONDS: Final = 0.5
"""Between two looks at progress: so often a person wants to see a number move."""

WAIT_SECONDS: Final = 30.0
"""How long one question waits for its answer: the server takes no more than a minute."""

BREATH_SECONDS: Final = 0.1
"""Before the next question: a server that is about to end holds nobody up."""

ENDING_SECONDS: Final = 3600.0
"""How long an answer may take that comes when jobs have ended: their grace is their own."""


class Job:
    """A job and what can be asked of it. `view` is what it was when last looked at.

    Every method raises `ClientError`, or what stands below it.
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

    # Looking

    def refresh(self) -> Self:
        """Look again."""
        return self._see(self._connection.ask("GET", self._path()))

    def summary(self) -> SummaryView:
        """Return how far it has come, with every rank."""
        return self._summary(math.inf)

    def workers(self) -> MemberList:
        """Return who is and was in its pool."""
        return self._get("workers").read_as(MemberList)

    def audit(self, last: int = 1000) -> AuditView:
        """Return what it has proved of its reading, with the last epochs and checkpoints."""
        return self._get("audit", limit=last).read_as(AuditView)

    def events(self, limit: int = 1000, *, after: int | None = None) -> list[EventView]:
        """Return the last `limit` things that happened to it, oldest first.

        With the `event_id` of one, as `after`, the first ones that came after that.
        """
        asked = _said(limit=limit, after=after)
        return self._get("events", **asked).read_as(EventList).events

    def incarnations(self) -> Iterator[IncarnationView]:
        """Yield every process of its ranks, the newest first, page by page."""
        page: str | None = self._path("incarnations")
        while page:
            answer = self._connection.ask("GET", page)
            yield from answer.read_as(IncarnationList).incarnations
            page = answer.next_page

    def follow_events(self, limit: int = 1000) -> Iterator[EventView]:
        """Yield the last `limit` things that happened to it, oldest first, and all to come."""
        last: EventView | None = None
        is_over = self.refresh().is_terminal
        while True:
            # Looked at after the job: what it came to its end by is among them.
            known = None if last is None else last.event_id
            came = news(self.events(limit if last is None else 1000, after=known), last)
            for event in came:
                yield event
                last = event
            if is_over and not came:
                return
            self._connection.sleep(BREATH_SECONDS)
            is_over = self._await("terminal", LOOK_SECONDS)

    def logs(
        self,
        rank: int | None = None,
        tail: int | None = None,
        *,
        since: datetime | None = None,
        grep: str | None = None,
        follow: bool = False,
    ) -> Iterator[LogLineView]:
        """Yield lines of one rank or of all: those that hold the text `grep`, if that is said.

        Without `follow` the last `tail` ones (None: as many as the server gives unasked), written
        at the moment `since` or later. With it the last `tail` complete ones (None: all), and then
        what is written until the job is over: without gap or repetition, also where the connection
        breaks off or the server is replaced. Raises `ValueError` for `since` with `follow`.
        """
        if not follow:
            moment = None if since is None else since.astimezone(UTC).isoformat()
            asked = _said(rank=rank, tail=tail, since=moment, grep=grep)
            return iter(self._get("logs", **asked).read_as(LogTail).lines)
        if since is not None:
            raise ValueError("a stream carries no times: say `tail`, or leave out `follow`")
        lines = self._follow(rank, tail)
        return (line for line in lines if grep in line.line) if grep else lines

    # Waiting

    def wait(
        self,
        until: str = "terminal",
        timeout_seconds: float | None = None,
        *,
        progress: bool = False,
    ) -> Self:
        """Wait until the job has the status `until` (in any case), or is over.

        With `progress`, standard error shows how far it is. Raises `WaitTimedOut` after
        `timeout_seconds`; the job goes on then, as far as anybody has said.
        """
        until = until if until == "terminal" else until.upper()
        if not progress:
            return self._wait(until, timeout_seconds, WAIT_SECONDS, lambda _: None)
        shown = Progress(sys.stderr, self._connection.monotonic)
        try:
            self._wait(
                until,
                timeout_seconds,
                LOOK_SECONDS,
                lambda deadline: shown.draw(self._summary(deadline)),
            )
            with suppress(ClientError):  # what was waited for is so, drawn or not
                shown.draw_last(self._summary(self._connection.monotonic()))
        finally:
            shown.close()
        return self

    def _wait(
        self,
        until: str,
        timeout_seconds: float | None,
        look_seconds: float,
        look: Callable[[float], None],
    ) -> Self:
        """Wait as said above, and `look` so often as long as it is not there."""
        patience_seconds = math.inf if timeout_seconds is None else timeout_seconds
        deadline = self._connection.monotonic() + patience_seconds
        try:
            while not self._await(until, min(look_seconds, self._left(deadline)), deadline):
                look(deadline)
                if self._left(deadline) <= 0:
                    raise WaitTimedOut(self.id, self.status, patience_seconds)
                self._connection.sleep(BREATH_SECONDS)
        except (Unreachable, Busy) as lost:
            if self._left(deadline) > max(LONGEST_PAUSE_SECONDS, retry_after(lost)):
                raise  # it was not for the deadline that nobody was asked again
            self._connection.sleep(max(0.0, self._left(deadline)))
            raise WaitTimedOut(self.id, self.status, patience_seconds, lost) from None
        return self

    def _left(self, deadline: float) -> float:
        return deadline - self._connection.monotonic()

    def _await(self, until: str, seconds: float, deadline: float = math.inf) -> bool:
        """Look again, once there is something to see or the time is over; return if it is there."""
        query: Query = {"until": until, "wait": max(0.0, seconds)}
        answer = self._connection.ask(
            "GET",
            self._path(),
            query=query,
            read_seconds=seconds + TIMEOUT_SECONDS,
            deadline=deadline,
        )
        return self._see(answer).is_terminal or self.status == until

    def _summary(self, deadline: float) -> SummaryView:
        answer = self._connection.ask("GET", self._path("summary"), deadline=deadline)
        return answer.read_as(SummaryView)

    # Orders

    def scale(self, world_size: int) -> Self:
        """Ask for another number of ranks, while it trains; of synchronous jobs only."""
        body = {"world_size": world_size}
        return self._see(self._connection.ask("PATCH", self._path(), body=body))

    def pause(self) -> Self:
        """Ask for no further step; the ranks stay. Of synchronous jobs only."""
        return self._order("pause")

    def resume(self) -> Self:
        """Let it go on."""
        return self._order("resume")

    def stop(self, grace_seconds: float | None = None, reason: str | None = None) -> Self:
        """Ask for a last checkpoint and an end; a job that is over stays as it is.

        `grace_seconds` is from SIGTERM to SIGKILL (None: the job's own). The job's events tell
        `reason`, and who asked.
        """
        return self._order("stop", _said(grace_seconds=grace_seconds, reason=reason))

    def delete(
        self, *, delete_logs: bool = True, stop_first: bool = False, force: bool = False
    ) -> Deleted:
        """Delete its rows and logs; it has to be over unless `stop_first` or `force` ends it.

        `force` ends it at once, and deletes its checkpoints, too.
        """
        query = {"delete_logs": delete_logs, "stop_first": stop_first, "force": force}
        answer = self._connection.ask(
            "DELETE", self._path(), query=query, read_seconds=ENDING_SECONDS
        )
        return answer.read_as(Deleted)

    def _follow(self, rank: int | None, tail: int | None) -> Iterator[LogLineView]:
        return follow(self._connection, self._path("logs", "stream"), rank, tail)

    def _get(self, what: str, **query: float | str) -> Answer:
        return self._connection.ask("GET", self._path(what), query=query)

    def _order(self, verb: str, body: object = None) -> Self:
        return self._see(self._connection.ask("POST", self._path(verb), body=body))

    def _see(self, answer: Answer) -> Self:
        view = answer.read_as(JobView)
        if view.job_uid != self.view.job_uid:
            raise Replaced(self.id)
        self.view = view
        return self

    def _path(self, *rest: str) -> str:
        return path_of(self.id, *rest)


def _said(**given: float | str | None) -> dict[str, int | float | str]:
    """Return what somebody has said; the rest is the server's to choose."""
    return {name: value for name, value in given.items() if value is not None}
