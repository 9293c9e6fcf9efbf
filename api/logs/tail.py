"""The last lines of a job: all ranks and incarnations, merged by time, read from the end."""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from api.logs.lines import Line, backwards, complete_size, size_of
from api.logs.position import Place, Position
from api.logs.times import Micros, TimeIndex
from muster.contracts.layout import JobFiles, LogName


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line, whose it is and when it was written (None: not known yet)."""

    name: LogName
    line: Line
    micros: Micros | None


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


def tail(files: JobFiles, rank: int | None, count: int) -> list[LogLine]:
    """Return the last `count` lines, oldest first, an unfinished last line included."""
    return _newest(files, logs_by_rank(files, rank), count, size_of)


def tail_position(files: JobFiles, rank: int | None, count: int) -> Position:
    """Return the place from which the last `count` complete lines, and all later ones, follow."""
    logs = logs_by_rank(files, rank)
    position: dict[int, Place] = {}
    for line in reversed(_newest(files, logs, count, complete_size)):
        position[line.name.rank] = (line.name.incarnation, line.line.start)
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


def _newest(
    files: JobFiles,
    logs: Mapping[int, Sequence[LogName]],
    count: int,
    end_of: Callable[[Path], int],
) -> list[LogLine]:
    ranks = [_backwards(files, names, end_of) for names in logs.values()]
    merged = heapq.merge(*ranks, key=lambda entry: entry[0], reverse=True)
    newest = [line for _, line in islice(merged, count)]
    newest.reverse()
    return newest


def _backwards(
    files: JobFiles, names: Sequence[LogName], end_of: Callable[[Path], int]
) -> Iterator[tuple[float, LogLine]]:
    """Yield one rank's lines, newest first, with a key that never goes up."""
    key = math.inf
    for name in reversed(names):
        index = TimeIndex(files.times(name.rank, name.incarnation))
        path = files.log(name.rank, name.incarnation)
        for line in backwards(path, end_of(path)):
            micros = index.at(line.end)
            key = key if micros is None else min(key, micros)
            yield key, LogLine(name, line, micros)
