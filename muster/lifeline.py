"""A service ends with whoever keeps it: `muster up` killed outright leaves nothing behind.

The keeper holds one end of a pipe and hands the other down. When the keeper is gone, however it
went, the pipe ends, and the service sends itself the signal of Ctrl-C. Ranks are no services: they
outlive everybody who could hold such a pipe.
"""

import os
import signal
import threading
from collections.abc import Mapping

from muster.contracts.environ import LIFELINE_FD


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
