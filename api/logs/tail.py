"""The last lines of a job: all ranks and attempts, merged by time, read from the end."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeAlias

from api.logs.files import (
    GAP,
    Line,
    Micros,
    Place,
    Position,
    Skipped,
    TimeIndex,
    extent_of,
    line_end_before,
    logs_by_rank,
    read_backwards,
)
from muster.contracts.paths import JobFiles, LogName

SEARCH_LIMIT_BYTES: Final = 32 << 20
"""How much is searched for one answer; takes well below a second."""

LINE_COST_BYTES: Final = 128
"""A shorter line counts as this much, so that many short lines take two seconds at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which lines of a job's logs are wanted; by default all."""

    rank: int | None = None
    attempt: int | None = None
    since: Micros | None = None
    until: Micros | None = None
    """Lines whose time is not known yet are later than this."""
    text: str | None = None
    after: Position = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, the log it is in, and when it was written (None: not known yet)."""

    name: LogName
    line: Line
    micros: Micros | None


@dataclass(frozen=True, slots=True)
class Tail:
    """The last lines that match a filter."""

    lines: Sequence[LogLine]
    is_complete: bool
    """False if the search stopped at its limit, so earlier lines may match as well."""


_Span: TypeAlias = tuple[int, int]
"""The bytes [start, end) of a log."""

_Dated: TypeAlias = tuple[float, LogLine | Skipped]
"""Lines with the key by which those of several ranks are merged."""


def read_tail(files: JobFiles, wanted: LogFilter, count: int) -> Tail:
    """Return the last `count` matching lines, oldest first, an unfinished last line included."""
    logs = logs_by_rank(files, wanted.rank)
    newest: list[LogLine] = []
    searched = 0
    for found in _merge(_candidates(files, names, wanted) for names in logs.values()):
        if len(newest) == count:
            break
        if searched >= SEARCH_LIMIT_BYTES:
            return Tail(newest[::-1], is_complete=False)
        lines = found if isinstance(found, Skipped) else found.line
        searched += max(lines.end - lines.start, LINE_COST_BYTES)
        if isinstance(found, LogLine):
            newest.append(found)
    return Tail(newest[::-1], is_complete=True)


def tail_position(files: JobFiles, rank: int | None, count: int) -> Position:
    """Return the position after which the last `count` complete lines and all later ones follow.

    It is fewer lines if those are longer than `SEARCH_LIMIT_BYTES`.
    """
    logs = logs_by_rank(files, rank)

    def complete(name: LogName) -> _Span:
        log = files.log(name.rank, name.incarnation)
        begin, end = extent_of(log)
        return 0, line_end_before(log, end, begin)

    lines = _merge(_read_rank(files, names, complete) for names in logs.values())
    position: dict[int, Place] = {}
    read = 0
    for line in islice((line for line in lines if isinstance(line, LogLine)), count):
        position[line.name.rank] = (line.name.incarnation, line.line.start)
        read += line.line.end - line.line.start
        if read >= SEARCH_LIMIT_BYTES:
            break
    for rank_without_line in logs.keys() - position.keys():
        last = logs[rank_without_line][-1]
        position[rank_without_line] = (last.incarnation, complete(last)[1])
    return position


def _merge(ranks: Iterable[Iterator[_Dated]]) -> Iterator[LogLine | Skipped]:
    """Yield the lines of all ranks, the newest first."""
    for _, found in heapq.merge(*ranks, key=itemgetter(0), reverse=True):
        yield found


def _candidates(files: JobFiles, names: Sequence[LogName], wanted: LogFilter) -> Iterator[_Dated]:
    """Yield one rank's lines, newest first, that match everything but the text."""
    first_attempt, first_offset = wanted.after.get(names[0].rank, (0, 0))

    def span_of(name: LogName) -> _Span:
        start = first_offset if name.incarnation == first_attempt else 0
        log = files.log(name.rank, name.incarnation)
        begin, size = extent_of(log)
        if wanted.until is None:
            return start, size
        written = TimeIndex(files.times(name.rank, name.incarnation)).size_at(wanted.until)
        return start, size if written >= size else line_end_before(log, written, begin)

    chosen = [
        name
        for name in names
        if wanted.attempt in {None, name.incarnation} and name.incarnation >= first_attempt
    ]
    for key, found in _read_rank(files, chosen, span_of, wanted.text):
        # A line without a time is newer than every mark.
        if wanted.since is not None and key < wanted.since:
            return
        yield key, found


def _read_rank(
    files: JobFiles,
    names: Sequence[LogName],
    span_of: Callable[[LogName], _Span],
    text: str | None = None,
) -> Iterator[_Dated]:
    """Yield one rank's lines, newest first, with a key that never increases."""
    key = math.inf
    for name in reversed(names):
        index = TimeIndex(files.times(name.rank, name.incarnation))
        log = files.log(name.rank, name.incarnation)
        start, end = span_of(name)
        begin, _ = extent_of(log)
        gap = [Line(start, begin, GAP)] if start < begin and not text else []
        for found in chain(read_backwards(log, end, text, max(start, begin)), gap):
            micros = index.at(found.end)
            key = key if micros is None else min(key, micros)
            yield key, found if isinstance(found, Skipped) else LogLine(name, found, micros)
