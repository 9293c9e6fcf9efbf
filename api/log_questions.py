"""Which part of a job's logs is asked for: queries and headers as values."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from fastapi import Depends, Header, Query
from pydantic import AwareDatetime

from api.logs.position import Position, Seen, parse_event_id
from api.logs.tail import Wanted
from api.logs.times import Micros
from api.problems import Conflict, FieldError, InvalidRequest
from store.records import Job

TAIL_DEFAULT: Final = 200
TAIL_LIMIT: Final = 10_000
GREP_LIMIT: Final = 1000

_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Whose lines, from where on; what a tail and a stream are both asked for."""

    rank: int | None
    tail: int | None
    seen: Seen | None
    """Up to where the reader has them."""

    def position_in(self, job: Job) -> Position | None:
        """Return from where on `job` is asked for; raises `Conflict` if that is another job's."""
        if self.seen is None:
            return None
        if not self.seen.is_of(job.uid):
            raise Conflict(
                "position-of-another-job",
                f"What was seen is of an earlier job {job.job_id}, which was deleted: leave the "
                "position out to read this one from its beginning.",
            )
        return self.seen.position


async def _asked_part(
    rank: Annotated[int | None, Query(ge=0, description="Only this rank's lines.")] = None,
    tail: Annotated[
        int | None,
        Query(
            ge=0,
            le=TAIL_LIMIT,
            description=f"Only the last lines. Default: {TAIL_DEFAULT}, and for a stream all.",
        ),
    ] = None,
    after: Annotated[str | None, Query(description="The id of the last event seen.")] = None,
    last_event_id: Annotated[str | None, Header(description="The same; it counts first.")] = None,
) -> Part:
    seen = None
    if last_event_id:
        seen = _seen(last_event_id, ("header", "last-event-id"))
    elif after is not None:
        seen = _seen(after, ("query", "after"))
    return Part(rank=rank, tail=tail, seen=seen)


async def _asked_filters(
    incarnation: Annotated[
        int | None, Query(ge=0, description="Only this process of each rank; the first is 0.")
    ] = None,
    since: Annotated[
        AwareDatetime | None, Query(description="Only what was written then or later.")
    ] = None,
    until: Annotated[
        AwareDatetime | None, Query(description="Only what was written by then.")
    ] = None,
    grep: Annotated[
        str | None, Query(max_length=GREP_LIMIT, description="Only lines that hold this text.")
    ] = None,
) -> Wanted:
    return Wanted(incarnation=incarnation, since=_micros(since), until=_micros(until), text=grep)


AskedPart = Annotated[Part, Depends(_asked_part)]
AskedFilters = Annotated[Wanted, Depends(_asked_filters)]
"""What a stream cannot be asked for."""


def _seen(text: str, where: tuple[str, str]) -> Seen:
    seen = parse_event_id(text)
    if seen is None:
        message = "is no position of ours: send the id of an event, or leave it out"
        raise InvalidRequest([FieldError(loc=where, msg=message, type="value_error")])
    return seen


def _micros(moment: datetime | None) -> Micros | None:
    return None if moment is None else (moment - _START) // _MICROSECOND
