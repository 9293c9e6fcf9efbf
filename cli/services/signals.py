"""The signals that end a command with services of its own."""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""SIGHUP: the terminal was closed. SIGUSR1: Slurm announces the end of the allocation."""

ONE_REQUEST_SECONDS: Final = 1.0
"""Signals within this time are one request: `timeout` and schedulers signal a process and then its
group."""


def interrupt_at_signals() -> None:
    """Have the first of `END_SIGNALS` raise `KeyboardInterrupt`, and ignore those that follow.

    So what has to be cleaned up is: `timeout` signals a process and then its group.
    """

    def interrupt(*_: object) -> None:
        ignore_signals()
        raise KeyboardInterrupt

    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)


def call_at_signals(function: Callable[[], None]) -> None:
    """Have the running event loop call `function` at each of `END_SIGNALS`."""
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            asyncio.get_running_loop().add_signal_handler(number, function)


def ignore_signals(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Ignore `END_SIGNALS` from now on, also those that `loop` handles."""
    # Blocked, because the loop puts the default back, with which a signal would end the command.
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    for number in END_SIGNALS:
        if loop is not None:
            loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
