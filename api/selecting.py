"""What a list of jobs is asked for: filters and order, from the query to a `Selection`."""

import re
from typing import Annotated, Final, Literal

from fastapi import Depends, Query
from pydantic import AwareDatetime

from api.problems import invalid_field
from api.queries import statuses_of
from store.selection import Selection

LABELS_LIMIT: Final = 16
"""Most labels of one question."""

_LABEL: Final = re.compile(r"([^\"\\\x00-\x1f:]+):([^\x00]*)", re.DOTALL)


async def _asked_selection(
    status: Annotated[
        list[str], Query(description="Only jobs with one of these statuses; may be repeated.")
    ] = [],  # noqa: B006  FastAPI copies it
    name: Annotated[str | None, Query(description="Only jobs of exactly this name.")] = None,
    label: Annotated[
        list[str],
        Query(description="Only jobs with this label, as `team:vision`; may be repeated."),
    ] = [],  # noqa: B006
    created_after: Annotated[
        AwareDatetime | None, Query(description="Only jobs created later than this.")
    ] = None,
    created_before: Annotated[
        AwareDatetime | None, Query(description="Only jobs created earlier than this.")
    ] = None,
    sort: Annotated[
        Literal["-created_at", "created_at"], Query(description="With the `-` the newest first.")
    ] = "-created_at",
) -> Selection:
    return Selection(
        statuses=statuses_of(status, "status"),
        name=_text(name),
        labels=_labels(label),
        created_after=created_after,
        created_before=created_before,
        oldest_first=sort == "created_at",
    )


AskedSelection = Annotated[Selection, Depends(_asked_selection)]


def _text(name: str | None) -> str | None:
    if name is not None and "\0" in name:
        raise invalid_field("query", "name", "holds a NUL character, which no name has")
    return name


def _labels(words: list[str]) -> dict[str, str]:
    if len(words) > LABELS_LIMIT:
        raise invalid_field("query", "label", f"{LABELS_LIMIT} at most can be asked for at once")
    found = [_LABEL.fullmatch(word) for word in words]
    labels = {label[1]: label[2] for label in found if label is not None}
    if len(labels) < len(words):
        raise invalid_field(
            "query",
            "label",
            "use name:value, each name once, without quotes and backslashes in it",
        )
    return labels
