"""The logs of a job in its directory on this machine."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeAlias

from muster.contracts.settings.paths import JobFiles, LogName
from muster.logs.follower import JobFollower
from muster.logs.log_file import LogFile, logs_by_rank
from muster.logs.source import GAP, Lines, LogFilter, Place, Position, Tail

SEARCH_LIMIT_BYTES: Final = 32 << 20
"""How much is searched for one answer; takes well below a second."""

LINE_COST_BYTES: Final = 128
"""A shorter line counts as this much, so that many short lines take two seconds at most."""

_Span: TypeAlias = tuple[LogFile, int, int, int]
"""The bytes [start, end) of a log, of which those before a third offset are gone."""

_Dated: TypeAlias = tuple[float, Lines]
"""Lines with the key by which those of several ranks are merged."""


class LocalLogs:
    """What the ranks of one job print, by rank, attempt and offset. Thread-safe.

    - The lines of a rank come in order, attempt by attempt. Lines of several ranks are merged by
      the time at which they were written; a line whose time is not known yet is the newest.
    - Followers return each line once, when it has ended or nothing is added to its log any more.
    - A position is valid in every process, and never means two bytes: a follower that starts at
      another's position returns exactly the rest. A place that does not exist means the beginning.
    - The beginning of a log may be gone: discarded by the job's agent, or truncated by its program.
      One line, `GAP`, takes its place.
    - A rank may print anything. A very long line, of 256 KiB or more, comes as several, so that no
      reader looks far for a line end.
    - A log that cannot be read has no lines: no method raises an OSError.
    """

    def __init__(self, files: JobFiles) -> None:
        self._files = files

    def tail(self, wanted: LogFilter, count: int) -> Tail:
        """Return the last `count` matching lines of the last `SEARCH_LIMIT_BYTES`.

        Oldest first, an unfinished last line included.
        """
        newest: list[Lines] = []
        searched = 0
        # A line without a time is newer than every mark.
        since = -math.inf if wanted.since is None else wanted.since
        logs = logs_by_rank(self._files, wanted.rank)
        ranks = (
            _read_rank(self._matching(names, wanted), wanted.text or "") for names in logs.values()
        )
        for key, lines in _merge(ranks):
            if len(newest) == count or key < since:
                break
            if searched >= SEARCH_LIMIT_BYTES:
                return Tail(newest[::-1], is_complete=False)
            searched += max(lines.end - lines.start, LINE_COST_BYTES)
            if lines.raw or not wanted.text:
                newest.append(lines)
        return Tail(newest[::-1], is_complete=True)

    def tail_position(self, rank: int | None, count: int) -> Position:
        """Return the position after which the last `count` complete lines and all later ones are.

        It is fewer lines if those are very long: at most `SEARCH_LIMIT_BYTES` are read.
        """
        logs = logs_by_rank(self._files, rank)
        position: dict[int, Place] = {}
        size = 0
        ranks = (_read_rank(self._complete(names)) for names in logs.values())
        for _, lines in islice(_merge(ranks), count):
            position[lines.name.rank] = (lines.name.attempt, lines.start)
            size += lines.end - lines.start
            if size >= SEARCH_LIMIT_BYTES:
                break
        for number in logs.keys() - position.keys():
            log, *_, end = next(self._complete(logs[number]))
            position[number] = (log.name.attempt, end)
        return position

    def follow(
        self, rank: int | None, position: Position, until: Position | None = None
    ) -> JobFollower:
        """Return a reader of all ranks or one from `position` on.

        With `until` it reads exactly up to that position, below which everything is complete.
        """
        return JobFollower(self._files, rank, position, until)

    def _complete(self, names: Sequence[LogName]) -> Iterator[_Span]:
        """Yield one rank's logs, the newest first, each as far as its lines are complete."""
        for name in reversed(names):
            log = LogFile(self._files, name)
            begin, end = log.extent()
            yield log, 0, begin, log.line_end_before(end, begin)

    def _matching(self, names: Sequence[LogName], wanted: LogFilter) -> Iterator[_Span]:
        first_attempt, first_offset = wanted.after.get(names[0].rank, (0, 0))
        for name in reversed(names):
            if wanted.attempt in {None, name.attempt} and name.attempt >= first_attempt:
                log = LogFile(self._files, name)
                begin, end = log.extent()
                written = end if wanted.until is None else log.times.size_at(wanted.until)
                if written < end:
                    end = log.line_end_before(written, begin)
                yield log, first_offset if name.attempt == first_attempt else 0, begin, end


def _merge(ranks: Iterable[Iterator[_Dated]]) -> Iterator[_Dated]:
    """Yield the lines of all ranks, the newest first."""
    return heapq.merge(*ranks, key=itemgetter(0), reverse=True)


def _read_rank(spans: Iterable[_Span], text: str = "") -> Iterator[_Dated]:
    """Yield one rank's lines, newest first, with a key that never increases."""
    key = math.inf
    for log, start, begin, end in spans:
        found = log.read_backwards(end, max(start, begin), text)
        if start < begin and not text:
            found = chain(found, [Lines(log.name, start, begin, GAP, log.times.at(begin))])
        for lines in found:
            key = key if lines.micros is None else min(key, lines.micros)
            yield key, lines
