"""Writes that come at the same time share a transaction, and its way to the disk.

Nearly all the time of a small write goes into making it durable, whatever else is in it. Sharing
that must not show: a write that is refused, or that the database refuses, is no other's affair.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

from sqlalchemy import Connection

from store.errors import StoreError, StoreUnavailable

Result = TypeVar("Result")

Transaction: TypeAlias = Callable[[], AbstractContextManager[Connection]]

Work: TypeAlias = Callable[[Connection], Result]
"""One write. It raises a `StoreError` only before it has written anything.

It may be done twice, once its first time is undone: what it keeps elsewhere must bear that.
"""


def write_together(
    transaction: Transaction, works: Sequence[Work[Result]]
) -> list[Result | Exception]:
    """Return what each of `works` has returned, durably, or what it has raised."""
    try:
        with transaction() as connection:
            return [_outcome(work, connection) for work in works]
    except StoreUnavailable as error:
        return [error] * len(works)
    except Exception as error:  # noqa: BLE001  of one of them, which is told what it was
        return [error] if len(works) == 1 else _one_by_one(transaction, works)


def trouble_of_all(outcomes: Sequence[Result | Exception]) -> StoreUnavailable | None:
    """Return why nobody has written anything, if that is so because the database was away."""
    troubles = [outcome for outcome in outcomes if isinstance(outcome, StoreUnavailable)]
    return troubles[0] if troubles and len(troubles) == len(outcomes) else None


def _one_by_one(
    transaction: Transaction, works: Sequence[Work[Result]]
) -> list[Result | Exception]:
    """Give each a transaction of its own, until the database is away: nobody waits for that twice.

    Those before it have written, whatever becomes of the others.
    """
    outcomes: list[Result | Exception] = []
    for work in works:
        outcomes += write_together(transaction, [work])
        if isinstance(outcomes[-1], StoreUnavailable):
            return outcomes + outcomes[-1:] * (len(works) - len(outcomes))
    return outcomes


def _outcome(work: Work[Result], connection: Connection) -> Result | Exception:
    try:
        return work(connection)
    except StoreError as refusal:
        return refusal
