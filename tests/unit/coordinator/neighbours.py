"""A process of this machine that does nothing, and may be made to stand still."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from muster.processes import stands_still


@contextmanager
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that sleeps, and end it."""
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        yield process
        process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop it, and return when it stands still."""
    process.send_signal(signal.SIGSTOP)
    while not stands_still(process.pid):
        time.sleep(0.001)
