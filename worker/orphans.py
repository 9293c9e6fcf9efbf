"""What a job's ranks leave to their agent, which is the subreaper of all that they start."""

import os
from collections.abc import Container
from typing import Final

from muster.patience import Patience
from muster.processes import descendants, identify, kill
from muster.sight import require_descriptors

STRANGERS_PATIENCE: Final = Patience(seconds=2.0, pause_seconds=0.01)
"""A process that survives SIGKILL for this long hangs in the kernel."""


def reap_orphans(own: Container[int]) -> None:
    """Reap every zombie up to one whose pid is `own`: its end is still to be looked at."""
    while True:
        try:
            zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if zombie is None or zombie.si_pid in own:
            return
        os.waitpid(zombie.si_pid, os.WNOHANG)


def end_strangers() -> None:
    """End whatever is below this process, once no rank lives and nothing is kept warm.

    Who shed its mark (``env -i``) and its session is nobody's while ranks live; what is left
    at the end of the job is the job's.
    """
    STRANGERS_PATIENCE.outlast(_end_each)


def _end_each() -> int:
    reap_orphans(own=())
    try:
        require_descriptors()
        records = [identify(pid) for pid in descendants(os.getpid())]
    except OSError:
        return 1  # at least: nobody can say what is there
    return sum(kill(record) for record in records if record is not None)
