"""Writes that wait for one another share a transaction, and its way to the disk.

Nearly all the time of a small write goes into making it durable, and all that comes meanwhile has
to wait. So the first to come leads: it commits its own write and those of everybody who waits by
then, and whoever has come since is led by the first of them. Alone, a write is led by itself.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from store.errors import StoreError, StoreUnavailable

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Part(Generic[Result]):
    """One write. It raises a `StoreError` only before it has written anything."""

    work: Callable[[Connection], Result]
    outcome: Future[Result] = field(default_factory=Future)
    turn: threading.Event = field(default_factory=threading.Event)
    """Set when there is an outcome, or when this part is to lead."""


class Company:
    """Whoever writes together to one database. For any number of threads."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._transaction = transaction
        self._lock = threading.Lock()
        self._waiting: deque[_Part[Any]] = deque()
        self._is_led = False

    @property
    def waiting(self) -> int:
        """How many have come since the last transaction began."""
        return len(self._waiting)

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Return what `work` has returned, once that is durable, or raise what it has raised."""
        part = _Part(work)
        if not self._join(part):
            part.turn.wait()
        if not part.outcome.done():
            self._lead()
        return part.outcome.result()

    def _join(self, part: _Part[Any]) -> bool:
        """Wait with the others; return whether `part` leads, because nobody else does."""
        with self._lock:
            self._waiting.append(part)
            leads = not self._is_led
            self._is_led = True
            return leads

    def _lead(self) -> None:
        try:
            self._commit(self._taken())
        except StoreUnavailable as error:
            # Who has come since has waited for the same: nobody need wait for it twice.
            _fail(self._taken(), error)
        finally:
            self._hand_over()

    def _taken(self) -> list[_Part[Any]]:
        with self._lock:
            parts = list(self._waiting)
            self._waiting.clear()
            return parts

    def _hand_over(self) -> None:
        with self._lock:
            self._is_led = bool(self._waiting)
            if self._is_led:
                self._waiting[0].turn.set()

    def _commit(self, parts: list[_Part[Any]]) -> None:
        try:
            with self._transaction() as connection:
                settled = [_attempted(part, connection) for part in parts]
        except StoreUnavailable as error:
            _fail(parts, error)
            raise
        except Exception as error:  # noqa: BLE001  of one of them, which is told what it was
            self._commit_apart(parts, error)
        else:
            for settle in settled:
                settle()

    def _commit_apart(self, parts: list[_Part[Any]], error: Exception) -> None:
        """Commit each by itself: a write that the database refuses is no other's affair."""
        if len(parts) == 1:
            _fail(parts, error)
            return
        for place, part in enumerate(parts):
            try:
                self._commit([part])
            except StoreUnavailable as trouble:
                _fail(parts[place + 1 :], trouble)
                raise


def _attempted(part: _Part[Any], connection: Connection) -> Callable[[], None]:
    """Do the work of `part`; return what tells it of the outcome when that is durable."""
    try:
        result = part.work(connection)
    except StoreError as refusal:
        return partial(_fail, [part], refusal)
    return partial(_succeed, part, result)


def _succeed(part: _Part[Result], result: Result) -> None:
    part.outcome.set_result(result)
    part.turn.set()


def _fail(parts: list[_Part[Any]], error: Exception) -> None:
    for part in parts:
        part.outcome.set_exception(error)
        part.turn.set()
