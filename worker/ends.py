"""The ends of a job's ranks, as its agent knows them: durable first, then told, then remembered.

A coordinator that comes back hears the last end of every rank again, in the very words.
"""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from muster.contracts.agent import AdoptedRank
from muster.contracts.endings import OF_A_SHELL
from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import ERROR_LIMIT, RankExited, RankSaid, Refused, StartRank
from muster.contracts.secrets import SecretUnavailable
from muster.exit_records import (
    read_exit_record,
    read_own_account,
    record_of,
    write_exit_record,
)
from muster.redaction import Redaction
from muster.remarks import remark
from worker.blame import is_of_the_order
from worker.child import Child
from worker.error_files import error_in
from worker.lives import UNSEEN, ExitStatus
from worker.memory import OomKills

CANNOT_START: Final = 126
"""Exit code of a rank that never became a process, as shells have it."""

KILLED_WITHIN: Final = OF_A_SHELL + signal.SIGKILL
"""Exit code of a shell whose program was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of one incarnation: its last words, and how."""

    said: tuple[RankSaid, ...] = ()
    exited: RankExited

    @classmethod
    def of_none(cls, rank: int, incarnation: int, number: signal.Signals) -> Self:
        """Return the end of an incarnation that was to be signalled and never was there."""
        exited = RankExited(
            rank=rank, incarnation=incarnation, exit_code=None, signal=number, last_lines=()
        )
        return cls(exited=exited)

    @classmethod
    def of_unstarted(cls, order: StartRank, error: OSError | SecretUnavailable) -> Self:
        """Return the end of an incarnation that did not start: refused, or to be tried again."""
        words = f"cannot be started in {order.working_dir}: {error}"
        refused = None
        if isinstance(error, SecretUnavailable):
            sentence = f"cannot be started: {error}"
            refused = Refused(reason=Reason.SECRET_UNAVAILABLE, message=sentence)
        elif is_of_the_order(error, order.working_dir):
            refused = Refused(reason=Reason.INVALID_PROGRAM, message=words)
        exited = RankExited(
            rank=order.rank,
            incarnation=order.incarnation,
            exit_code=None if refused is None else CANNOT_START,
            signal=None,
            last_lines=(),
            unstarted=words if refused is None else None,
        )
        if refused is None:
            return cls(exited=exited)
        said = RankSaid(rank=order.rank, incarnation=order.incarnation, message=refused)
        return cls(said=(said,), exited=exited)


class Ends:
    """The last end of each rank."""

    def __init__(self, files: JobFiles, redaction: Redaction | None = None) -> None:
        self._files = files
        self._redaction = redaction or Redaction()
        self._last: dict[int, End] = {}
        self._oom_kills = OomKills()

    def record(self, child: Child, ending: ExitStatus) -> End:
        """Return how a child has ended, once that is on disk."""
        end = End(
            said=tuple(map(self._redaction.of, child.last_words())),
            exited=self._redaction.of(self._exited(child, ending)),
        )
        try:
            write_exit_record(self._files, record_of(child.pid, end.said, end.exited))
        except OSError as error:  # a full disk must not take the agent, and all ranks, with it
            remark(f"the end of rank {child.rank} is not on record: {error}")
        return end

    def learn(self, child: Child) -> tuple[Sequence[RankSaid], ExitStatus]:
        """Return what a child that is gone had said to nobody, and how it ended.

        The kernel knows how, if anybody of ours looked. The words may have found a full channel,
        or no agent; and if nobody looked, the process's own account is what there is.
        """
        seen = child.ending()
        own = read_own_account(self._files, child.rank, child.incarnation, child.pid)
        if own is None:
            return (), seen
        # It leaves out what it holds of secrets, in what it writes down and not in what it says.
        heard = [self._redaction.of(said) for said in child.last_words()]
        unheard = [said for said in own.said if said not in heard and child.take(said.message)]
        told = ExitStatus(exit_code=own.exited.exit_code, signal=None)
        return unheard, told if seen == UNSEEN else seen

    def recorded(self, adopted: AdoptedRank) -> End | None:
        """Return the end that an earlier agent has written down, if it has."""
        record = read_exit_record(self._files, adopted.rank, adopted.incarnation, adopted.process)
        return None if record is None else End(said=record.said, exited=record.exited)

    def remember(self, end: End) -> None:
        """Tell it to every coordinator that comes."""
        self._last[end.exited.rank] = end

    def forget(self, rank: int) -> None:
        """A new incarnation of this rank has begun."""
        self._last.pop(rank, None)

    def has_passed(self, rank: int, incarnation: int) -> bool:
        """Return whether that incarnation, or a later one, has ended."""
        last = self._last.get(rank)
        return last is not None and incarnation <= last.exited.incarnation

    def told(self) -> Iterator[RankSaid | RankExited]:
        """Yield what has been told of all of them."""
        for end in self._last.values():
            yield from end.said
            yield end.exited

    def _exited(self, child: Child, ending: ExitStatus) -> RankExited:
        return RankExited(
            rank=child.rank,
            incarnation=child.incarnation,
            exit_code=ending.exit_code,
            signal=ending.signal,
            # Of one that ended well nobody asks, and thousands of them are told at once.
            last_lines=() if ending.exit_code == 0 else child.logbook.last_lines(),
            out_of_memory=_may_be_killed(ending) and self._oom_kills.claim(),
            error=None if ending.exit_code == 0 else self._error_of(child),
        )

    def _error_of(self, child: Child) -> str | None:
        error = error_in(self._files.error_file(child.rank, child.incarnation))
        # Cut last: in half of a secret nobody would recognize it.
        return None if error is None else self._redaction.without(error)[:ERROR_LIMIT]


def _may_be_killed(ending: ExitStatus) -> bool:
    """Whether SIGKILL ended it, or the program that a shell or a container ran for it."""
    return ending.signal == signal.SIGKILL or ending.exit_code == KILLED_WITHIN
