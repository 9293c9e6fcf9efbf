"""Which jobs a list is to show, and in which order; as a value, and as conditions on rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement

from muster.contracts.job import JobStatus
from store.database import Database
from store.rows import status_shown_in
from store.tables import JOBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The jobs to which all of this applies; without any filter, all jobs."""

    statuses: Collection[JobStatus] = tuple(JobStatus)
    """Acts on `Job.status_shown`; an empty one lets nothing through."""
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """No name in it holds a quote, a backslash or a control character."""
    created_after: datetime | None = None
    created_before: datetime | None = None
    oldest_first: bool = False


def conditions(database: Database, selection: Selection) -> list[ColumnElement[bool]]:
    """Return what a row must fulfil. None where none is needed: all rows are counted quickly."""
    spec = database.json(JOBS.c.spec)
    # Step by step: of a path PostgreSQL would read commas, braces and NULL in a name as its own.
    found = [spec["labels"][name].as_string() == value for name, value in selection.labels.items()]
    if set(selection.statuses) != set(JobStatus):
        found.append(status_shown_in(selection.statuses))
    if selection.name is not None:
        found.append(spec["name"].as_string() == selection.name)
    if selection.created_after is not None:
        found.append(JOBS.c.created_at > selection.created_after)
    if selection.created_before is not None:
        found.append(JOBS.c.created_at < selection.created_before)
    return found
