"""The first process of a machine that a test freezes: names it, starts one service, outlives it.

Run in name spaces of its own (`frozen_hosts`), it sees no process of any other machine, and none of
theirs can end one of its. ``python host_init.py NAME COMMAND...``
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    name, *command = sys.argv[1:]
    socket.sethostname(name)
    _hide_control_groups()
    is_respawned = os.environ.pop("RESPAWN", None)
    service = subprocess.Popen(command)
    while True:
        # Whatever is left without a parent comes here.
        with suppress(ChildProcessError):
            pid, status = os.wait()
            if pid == service.pid:
                code = os.waitstatus_to_exitcode(status)
                print(f"the service ended with {code}", flush=True)  # noqa: T201  the host's log
                if is_respawned and code:
                    service = subprocess.Popen(command)
            continue
        os.read(0, 1)  # nothing is left: wait for the end of the test
        return


def _hide_control_groups() -> None:
    """Another host has other control groups, and killing one would kill all hosts."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            place = fields.split()[4]
            command = ["mount", "-t", "tmpfs", "-o", "ro", "none", place]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
