"""Which job a person means: an id, a unique prefix of one, a name, or ``@latest``."""

import difflib
import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Final

from muster.client.connection import Connection, Query
from muster.client.errors import Ambiguous, NotFound, Problem
from muster.client.views import JobList, JobView
from muster.contracts.spec import JOB_ID_PATTERN, RESERVED_IDS

LATEST: Final = "@latest"
"""The job that was submitted last."""

SHOWN: Final = 5
"""Most ids that are named where a word means several."""


def find(connection: Connection, word: str) -> JobView:
    """Return the job that `word` means; raises `NotFound` or `Ambiguous`.

    An id goes before a name, and a name before a prefix.
    """
    found = _named(connection, word)
    if found is None:
        every = list(pages(connection, {}))
        found = _only(word, [job for job in every if word and job.job_id.startswith(word)])
    if found is None:
        raise _no_job(word, [name for job in every for name in (job.job_id, job.name) if name])
    return found


def find_named(connection: Connection, word: str) -> JobView:
    """Return the job whose id or name `word` is in full; raises `NotFound` or `Ambiguous`.

    Who repeats an order that took the job away does not mean the next one that begins alike.
    """
    found = _named(connection, word)
    if found is None:
        near = find(connection, word)
        raise _not_found(f"there is no job {word!r}: if {near.job_id} is meant, say all of it")
    return found


def _named(connection: Connection, word: str) -> JobView | None:
    if word == LATEST:
        return _latest(connection)
    if re.fullmatch(JOB_ID_PATTERN, word) and word not in RESERVED_IDS:
        try:
            return connection.ask("GET", f"/jobs/{word}").read_as(JobView)
        except NotFound:
            pass  # not an id: a name, then, or the beginning of an id
    return _only(word, list(pages(connection, {"name": word})))


def _only(word: str, found: Sequence[JobView]) -> JobView | None:
    if len(found) > 1:
        raise Ambiguous(word, [job.job_id for job in found[:SHOWN]])
    return found[0] if found else None


def pages(connection: Connection, query: Query) -> Iterator[JobView]:
    """Yield jobs, newest first, page by page."""
    answer = connection.ask("GET", "/jobs", query=query)
    yield from answer.read_as(JobList).jobs
    while answer.next_page:
        answer = connection.ask("GET", answer.next_page)
        yield from answer.read_as(JobList).jobs


def _latest(connection: Connection) -> JobView:
    jobs = connection.ask("GET", "/jobs", query={"limit": 1}).read_as(JobList).jobs
    if not jobs:
        raise _not_found("there is no job yet: muster submit makes one")
    return jobs[0]


def _no_job(word: str, known: Sequence[str]) -> NotFound:
    near = difflib.get_close_matches(word, [*known, LATEST], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "muster ps lists them"
    return _not_found(f"there is no job {word!r}: {hint}")


def _not_found(detail: str) -> NotFound:
    """Return what the server would say, had it looked at names as well."""
    return NotFound(
        Problem(
            status=HTTPStatus.NOT_FOUND,
            type="/problems/job-not-found",
            title="Job not found",
            detail=detail,
        )
    )
