"""How a process ended, in words: one voice for ranks, agents and services."""

import signal


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
