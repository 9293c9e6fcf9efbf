"""How a process ended: in words, with one voice, and what follows from it. The policy is data."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DO_NOT_RETRY_CODE: Final = 64
"""A program that exits with it is not started again. Many use it already for a command line that
makes no sense (EX_USAGE in sysexits.h), which is the same wish."""

REPLACED_CODE: Final = 75
"""Of a rank or a coordinator that has noticed its successor (EX_TEMPFAIL in sysexits.h)."""

OF_A_SHELL: Final = 128
"""What a shell, or a container, adds to the number of the signal that ended a program."""

INTERRUPTED_CODE: Final = OF_A_SHELL + signal.SIGINT
"""What a shell expects of a program that Ctrl-C has ended."""


class RetryClass(StrEnum):
    """What the end of one incarnation says about the next."""

    FINISHED = "finished"
    """It exited with code 0 and nothing is left to do."""
    STOPPED = "stopped"
    """We ended it, or its job was ending: there is no next one."""
    CRASH = "crash"
    """It failed by itself: an exit code, a signal, other bits than those of its group."""
    HANG = "hang"
    """It was silent, took no step, or gave no sign of life at its start, and was killed."""
    OUT_OF_MEMORY = "out_of_memory"
    """It was killed for its memory, or said that it had too little."""
    PREEMPTION = "preemption"
    """Somebody else asked it to stop: a machine that is needed for something more important."""
    INFRASTRUCTURE = "infrastructure"
    """It ended with its agent or its coordinator, or while it had none: nobody saw how, or somebody
    of ours had asked it to go. Or its host had no process, descriptor or room for it, so that it
    never began."""
    INVALID_PROGRAM = "invalid_program"
    """It would only meet again what it met: the program, its data or its checkpoints are wrong."""
    DO_NOT_RETRY = "do_not_retry"
    """It exited with `DO_NOT_RETRY_CODE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What a class costs that is started again."""

    budget: str
    """The field of `JobSpec` that says how often one rank may end like this."""
    is_restart: bool
    """Counted in `restarts`, and among the ends without progress."""
    occasion: str
    """What is added to "restart 3 of 50"."""


RETRIES: Final[Mapping[RetryClass, Retry]] = {
    RetryClass.CRASH: Retry(budget="max_restarts", is_restart=True, occasion=""),
    RetryClass.HANG: Retry(budget="max_hangs", is_restart=True, occasion=" after a hang"),
    RetryClass.OUT_OF_MEMORY: Retry(
        budget="max_out_of_memory", is_restart=True, occasion=" for lack of memory"
    ),
    RetryClass.PREEMPTION: Retry(
        budget="max_preemptions", is_restart=False, occasion=" after a preemption"
    ),
}
"""Infrastructure is started again while there is progress, what else is not named here never."""


def describe_end(exit_code: int | None, signal_number: int | None) -> str:
    """Return a verb phrase, such as ``was ended by signal 9 (SIGKILL)``."""
    if signal_number is not None:
        return f"was ended by signal {signal_number} ({_name(signal_number)})"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    return "ended unseen"


def describe_status(status: int) -> str:
    """Return the same for what `subprocess` returns: a negative number is a signal."""
    return describe_end(None, -status) if status < 0 else describe_end(status, None)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "an unnamed signal"  # real-time signals have numbers only
