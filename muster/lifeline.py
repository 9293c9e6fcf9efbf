"""A service ends with whoever keeps it: `muster up` killed outright leaves nothing behind.

The keeper holds one end of a pipe and hands the other down. When the keeper is gone, however it
went, the pipe ends, and the service sends itself the signal of Ctrl-C. Ranks are no services: they
outlive everybody who could hold such a pipe.
"""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from muster.contracts.environ import LIFELINE_FD


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Start a service inside: SIGINT then waits in the kernel until it can be heard.

    A signal that ends an interpreter in the middle of its imports would leave undone what the
    service is to do at its end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        # Unblocked, and not put back as it was: two of these may overlap on one event loop.
        release_interrupt()


def release_interrupt() -> None:
    """Hear SIGINT from now on, and the one that came before; a service says so when it can."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def follow(environ: Mapping[str, str]) -> None:
    """End with the keeper that the environment names, if it names one."""
    text = environ.get(LIFELINE_FD)
    if text is not None:
        descriptor = int(text)
        os.set_inheritable(descriptor, False)  # noqa: FBT003  the standard library's signature
        threading.Thread(target=_wait, args=[descriptor], name="lifeline", daemon=True).start()


def _wait(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
