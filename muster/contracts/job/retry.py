"""How a process ended, whether it is started again, and after how long. The policy is data."""

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DO_NOT_RETRY_CODE: Final = 64
"""A program that exits with it is not started again. It is EX_USAGE in sysexits.h, which many
programs return for an invalid command line."""

REPLACED_CODE: Final = 75
"""Exit code of a rank or coordinator that was replaced by its successor (EX_TEMPFAIL)."""

SIGNAL_BASE: Final = 128
"""A shell or a container adds it to the number of the signal that ended a program."""

INTERRUPTED_CODE: Final = SIGNAL_BASE + signal.SIGINT
"""Exit code of a program that was ended by Ctrl-C."""


class RetryClass(StrEnum):
    """Why one attempt ended, which decides whether there is another one."""

    FINISHED = "finished"  # it exited with code 0 and its work is done
    STOPPED = "stopped"  # we stopped it, or its job was ending: it is not restarted
    CRASH = "crash"
    """It failed by itself: an exit code, a signal, or bits that differ from those of its group."""
    KILLED = "killed"
    """A SIGKILL ended it that Muster did not send and no lack of memory explains."""
    HANG = "hang"
    """It was killed because it sent no heartbeat, took no step, or did not start up in time."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed it for its memory, or it reported that memory ran out."""
    PREEMPTION = "preemption"
    """A process outside of Muster asked it to stop, for example because its machine is needed."""
    INFRASTRUCTURE = "infrastructure"
    """It ended with its agent or coordinator, or while it had none, so that its end was not
    observed. Or its host had no process, descriptor or memory for it, and it never started."""
    INVALID_PROGRAM = "invalid_program"
    """The program, its data or its checkpoints are wrong: every attempt would fail the same way."""
    DO_NOT_RETRY = "do_not_retry"  # it exited with `DO_NOT_RETRY_CODE`


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The cost of a restart after an end of one class."""

    budget: str  # the field of `JobSpec` that limits how often one rank may end like this
    is_restart: bool  # counted in `restarts`
    is_from_outside: bool = False  # by a signal that Muster did not send: the delay does not grow
    occasion: str  # appended to "restart 3 of 50"


RETRIES: Final[Mapping[RetryClass, Retry]] = {
    RetryClass.CRASH: Retry(budget="max_restarts", is_restart=True, occasion=""),
    RetryClass.KILLED: Retry(
        budget="max_kills", is_restart=True, is_from_outside=True, occasion=" after a kill"
    ),
    RetryClass.HANG: Retry(budget="max_hangs", is_restart=True, occasion=" after a hang"),
    RetryClass.OUT_OF_MEMORY: Retry(
        budget="max_out_of_memory", is_restart=True, occasion=" for lack of memory"
    ),
    RetryClass.PREEMPTION: Retry(
        budget="max_preemptions",
        is_restart=False,
        is_from_outside=True,
        occasion=" after a preemption",
    ),
}
"""Infrastructure ends are retried as long as there is progress; classes not named here never."""


def describe_end(exit_code: int | None, signal_number: int | None) -> str:
    """Return a verb phrase, such as ``was ended by signal 9 (SIGKILL)``."""
    if signal_number is not None:
        try:
            name = signal.Signals(signal_number).name
        except ValueError:
            name = "an unnamed signal"  # real-time signals have numbers only
        return f"was ended by signal {signal_number} ({name})"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    return "ended unseen"


def describe_status(status: int) -> str:
    """Return the same for a `subprocess` return code, where a negative number is a signal."""
    return describe_end(None, -status) if status < 0 else describe_end(status, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long a failed rank waits before its restart: exponential, capped, with seeded jitter.

    A pure function: the same failures of the same rank of the same job give the same delays.
    """

    first_seconds: float = 0.5
    factor: float = 2.0
    cap_seconds: float = 30.0
    jitter: float = 0.25
    """The delay is drawn from [1 - jitter, 1] of the scheduled one, so that ranks that die
    together do not restart together."""
    reset_after_seconds: float = 60.0  # after this long without a failure the count starts again

    def delay_seconds(self, failures: int, seed: str) -> float:
        """Return the wait after the `failures`-th failure in a row (1 is the first; 0 for none).

        `seed` names the rank, for example ``"<job uid>/<rank>"``.
        """
        if failures == 0:
            return 0.0
        # The exponent is bounded before the power is taken: 2.0 ** 1100 is an OverflowError.
        doublings = min(failures - 1, 64)
        scheduled = min(self.cap_seconds, self.first_seconds * self.factor**doublings)
        draw = random.Random(f"{seed}/{failures}").random()  # noqa: S311  jitter, no secret
        return scheduled * (1.0 - self.jitter * draw)

    def failures_after(self, failures: int, healthy_seconds: float) -> int:
        """Return how many failures still count after a healthy period."""
        return 0 if healthy_seconds >= self.reset_after_seconds else failures


DEFAULT_BACKOFF: Final = Backoff()
"""0.5 s, 1 s, 2 s, … up to 30 s; reset after a minute without failure."""

VRAM_BACKOFF: Final = Backoff(first_seconds=30.0, cap_seconds=300.0, jitter=0.0)
"""Between tries of a rank that waits for GPU memory, which others hold for minutes or hours."""
