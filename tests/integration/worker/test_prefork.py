"""Ways to start a process, when the better one fails."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from muster.contracts.environ import PROCESS_TAG
from muster.contracts.messages import StartRank
from muster.host.containment import cgroups_of_job, kill_cgroup, tagged_processes
from muster.host.limits import OpenFileLimits
from muster.host.processes import kill
from tests.support.installation import await_value
from worker.start import PreforkStarter, Started

PATIENCE_SECONDS = 10.0


class Workshop:
    """A warm template, and what is needed to start something with it."""

    def __init__(self, directory: Path) -> None:
        self.uid = uuid4().hex
        self.fork = PreforkStarter(self.uid, OpenFileLimits(1024, 1024))
        self.fork.warm_up()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)

    def starts(self, incarnation: int) -> Started:
        mark = f"{self.uid}/0/{incarnation}"
        order = StartRank(
            rank=0, incarnation=incarnation, environment={PROCESS_TAG: mark}, working_dir="/"
        )
        return self.fork.start(order, self.log, self.theirs)

    def close(self) -> None:
        self.fork.close()
        self.ours.close()
        self.theirs.close()
        os.close(self.log)
        # No agent looks after what was started: it leaves a cell, where cells are to be had.
        assert all(map(kill_cgroup, cgroups_of_job(self.uid)))


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def test_what_a_prefork_server_has_left_is_killed_first(
    workshop: Workshop,
) -> None:
    half = subprocess.Popen(["/bin/sleep", "600"], env={PROCESS_TAG: f"{workshop.uid}/0/0"})
    (template,) = await_value(
        lambda: tagged_processes(f"{workshop.uid}/template"), lambda: "there is no template"
    )
    kill(template)
    started = workshop.starts(0)
    assert half.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert started.handle is not None
    started.handle.wait(PATIENCE_SECONDS)
