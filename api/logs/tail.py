"""The last lines of a job: all ranks and incarnations, merged by time, read from the end."""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final, TypeAlias

from api.logs.lines import Line, Passed, backwards, complete_size, line_end_before, size_of
from api.logs.position import Place, Position
from api.logs.times import Micros, TimeIndex
from muster.contracts.layout import JobFiles, LogName

SEARCH_LIMIT_BYTES: Final = 32 << 20
"""Most that is looked at for one answer, beside a line of each rank: well below a second."""

LINE_COST_BYTES: Final = 128
"""What a line counts for at least that is taken apart: so two seconds are the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines of a job's logs somebody wants; without any filter, all lines."""

    rank: int | None = None
    incarnation: int | None = None
    since: Micros | None = None
    until: Micros | None = None
    """Lines whose time is not known yet are later than this."""
    text: str | None = None
    """What a line holds."""
    after: Position = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, whose it is and when it was written (None: not known yet)."""

    name: LogName
    line: Line
    micros: Micros | None


@dataclass(frozen=True, slots=True)
class Tail:
    """The last lines that were wanted."""

    lines: Sequence[LogLine]
    is_complete: bool
    """Whether there is none before them that belongs here, and was not looked at."""


Span: TypeAlias = tuple[int, int]
"""From the beginning of a line to the end of one."""

Dated: TypeAlias = tuple[float, LogLine | Passed]
"""A line, or several, behind the key by which those of several ranks are merged."""


def logs_by_rank(files: JobFiles, rank: int | None) -> dict[int, list[LogName]]:
    """Return the logs there are, of all ranks or one, by rank and in order of incarnation."""
    try:
        names = sorted(
            name for path in files.logs.iterdir() if (name := LogName.parse(path.name)) is not None
        )
    except OSError:  # nothing was written yet, or it was deleted
        names = []
    found: dict[int, list[LogName]] = defaultdict(list)
    for name in names:
        if rank is None or name.rank == rank:
            found[name.rank].append(name)
    return found


def tail(files: JobFiles, wanted: Wanted, count: int) -> Tail:
    """Return the last `count` wanted lines, oldest first, an unfinished last line included."""
    logs = logs_by_rank(files, wanted.rank)
    newest: list[LogLine] = []
    looked_at = 0
    for found in _merged(_wanted(files, logs[rank], wanted) for rank in logs):
        if len(newest) == count:
            break
        if looked_at >= SEARCH_LIMIT_BYTES:
            return Tail(newest[::-1], is_complete=False)
        if isinstance(found, Passed):
            looked_at += found.end - found.start
            continue
        looked_at += max(found.line.end - found.line.start, LINE_COST_BYTES)
        if wanted.text is None or wanted.text in found.line.text:
            newest.append(found)
    return Tail(newest[::-1], is_complete=True)


def tail_position(files: JobFiles, rank: int | None, count: int) -> Position:
    """Return the place from which the last `count` complete lines, and all later ones, follow.

    Fewer lines, if so many are longer than `SEARCH_LIMIT_BYTES`.
    """
    logs = logs_by_rank(files, rank)

    def complete(name: LogName) -> Span:
        return 0, complete_size(files.log(name.rank, name.incarnation))

    lines = _merged(_backwards(files, logs[one], complete) for one in logs)
    position: dict[int, Place] = {}
    looked_at = 0
    for line in islice((line for line in lines if isinstance(line, LogLine)), count):
        position[line.name.rank] = (line.name.incarnation, line.line.start)
        looked_at += line.line.end - line.line.start
        if looked_at >= SEARCH_LIMIT_BYTES:
            break
    return {**_ends(files, logs, position), **position}


def _ends(
    files: JobFiles, logs: Mapping[int, Sequence[LogName]], known: Position
) -> dict[int, Place]:
    ends = {}
    for rank, names in logs.items():
        if rank not in known:
            last = names[-1].incarnation
            ends[rank] = (last, complete_size(files.log(rank, last)))
    return ends


def _merged(ranks: Iterable[Iterator[Dated]]) -> Iterator[LogLine | Passed]:
    """Yield the lines of all ranks, the newest first."""
    for _, found in heapq.merge(*ranks, key=itemgetter(0), reverse=True):
        yield found


def _wanted(files: JobFiles, names: Sequence[LogName], wanted: Wanted) -> Iterator[Dated]:
    """Yield one rank's lines, newest first, that are wanted whatever their text is."""
    earliest = wanted.after.get(names[0].rank, (0, 0))

    def span_of(name: LogName) -> Span:
        start = earliest[1] if name.incarnation == earliest[0] else 0
        log = files.log(name.rank, name.incarnation)
        size = size_of(log)
        if wanted.until is None:
            return start, size
        written = TimeIndex(files.times(name.rank, name.incarnation)).size_at(wanted.until)
        return start, size if written >= size else line_end_before(log, written)

    chosen = [
        name
        for name in names
        if wanted.incarnation in {None, name.incarnation} and name.incarnation >= earliest[0]
    ]
    for key, found in _backwards(files, chosen, span_of, wanted.text):
        # A line without a time is younger than every mark.
        if wanted.since is not None and key < wanted.since:
            return
        yield key, found


def _backwards(
    files: JobFiles,
    names: Sequence[LogName],
    span_of: Callable[[LogName], Span],
    text: str | None = None,
) -> Iterator[Dated]:
    """Yield one rank's lines, newest first, with a key that never goes up."""
    key = math.inf
    for name in reversed(names):
        index = TimeIndex(files.times(name.rank, name.incarnation))
        start, end = span_of(name)
        for found in backwards(files.log(name.rank, name.incarnation), end, text, start):
            micros = index.at(found.end)
            key = key if micros is None else min(key, micros)
            yield key, found if isinstance(found, Passed) else LogLine(name, found, micros)
