"""What lets a job's commands save and exit when no agent ever comes back.

A rank that uses our handle looks for agents itself, and gives up after the orphan timeout. A
command that knows nothing of us would go on for ever if its agent and the coordinator were gone
for good. So its agent leaves a warden behind: a small shell that waits for the end of
the agent's pipe, then as long as the timeout, and only then starts this module. The next agent, or
a coordinator's sweep, ends it with the other strays: whoever looks after the ranks needs none.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.contracts.environ import MARK
from muster.contracts.process import ProcessRecord
from muster.patience import Patience
from muster.processes import marked, send_signal
from muster.remarks import remark
from worker.strays import end_strays

PAUSE_SECONDS: Final = 0.1

ASKING: Final = "muster:asking"
"""The name that a warden goes by from just before it asks. The kernel keeps 15 bytes of a name."""

_WAIT: Final = """
read -r _                       # nobody ever writes into the pipe: it ends with the agent
{ sleep "$1"; } 2>/dev/null &&  # who ends the sleep ends us, without a word in the agent's log
exec "$0" -P -m worker.warden "$2" "$3"
"""


class Warden:
    """The warden of this agent's ranks. It must not outlive an agent that leaves in good order."""

    def __init__(
        self, job_uid: str, orphan_timeout_seconds: float, stop_grace_seconds: float
    ) -> None:
        """Raises OSError if there is no process to be had."""
        times = (repr(orphan_timeout_seconds), job_uid, repr(stop_grace_seconds))
        self._process = subprocess.Popen(  # noqa: S603  a script of our own
            ["/bin/sh", "-c", _WAIT, sys.executable, *times],
            stdin=subprocess.PIPE,  # our end closes when we end, however that is
            env={**os.environ, MARK: f"{job_uid}/warden"},
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it: no rank is left."""
        self._process.kill()
        self._process.communicate()


def is_at_work(job_uid: str) -> bool:
    """Return whether a job's warden has waited long enough, and is asking its ranks to exit."""
    return any(_name_of(record.pid) == ASKING for record in marked(f"{job_uid}/warden"))


def _name_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return None


def end_orphans(job_uid: str, grace_seconds: float) -> None:
    """Ask everything of the job but this process to exit, and end what does not in time."""
    orphans = _others(job_uid)
    # First the sign: an agent that comes after all must know that whoever exits now was asked to.
    with suppress(OSError):  # without a sign they are asked all the same
        Path("/proc/self/comm").write_text(ASKING)
    for record in orphans:
        send_signal(record, signal.SIGTERM)
    grace = Patience(seconds=grace_seconds, pause_seconds=PAUSE_SECONDS)
    grace.outlast(lambda: len(_others(job_uid)))
    end_strays(job_uid, spared=())


def _others(job_uid: str) -> list[ProcessRecord]:
    return [record for record in marked(f"{job_uid}/") if record.pid != os.getpid()]


def main() -> int:
    """End the ranks of the job that the command line names."""
    job_uid, grace_seconds = sys.argv[1:]
    end_orphans(job_uid, float(grace_seconds))
    remark("no agent came back: the ranks were asked to save and exit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
