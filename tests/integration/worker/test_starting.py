"""Ways to start a process, when the better one fails."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from installation import await_value
from scarcity import no_descriptors

from muster.cells import cells_of_job, clear_cell
from muster.contracts.environ import MARK
from muster.contracts.messages import StartRank
from muster.descriptors import DescriptorLimits
from muster.processes import kill, marked
from worker.starting import Fork, Started

PATIENCE_SECONDS = 10.0


class Workshop:
    """A warm template, and what is needed to start something with it."""

    def __init__(self, directory: Path) -> None:
        self.uid = uuid4().hex
        self.fork = Fork(self.uid, DescriptorLimits(1024, 1024))
        self.fork.warm_up()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)

    def starts(self, incarnation: int) -> Started:
        mark = f"{self.uid}/0/{incarnation}"
        order = StartRank(
            rank=0, incarnation=incarnation, environment={MARK: mark}, working_dir="/"
        )
        return self.fork.start(order, self.log, self.theirs)

    def close(self) -> None:
        self.fork.close()
        self.ours.close()
        self.theirs.close()
        os.close(self.log)
        # No agent looks after what was started: it leaves a cell, where cells are to be had.
        assert all(map(clear_cell, cells_of_job(self.uid)))


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


def test_what_a_template_may_have_left_is_ended_before_anything_else_starts(
    workshop: Workshop,
) -> None:
    half = subprocess.Popen(["/bin/sleep", "600"], env={MARK: f"{workshop.uid}/0/0"})
    (template,) = await_value(
        lambda: marked(f"{workshop.uid}/template"), lambda: "there is no template"
    )
    kill(template)
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        workshop.starts(0)
    assert half.poll() is None, "nobody could see it"
    started = workshop.starts(1)
    assert half.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert started.handle is not None
    started.handle.wait(PATIENCE_SECONDS)
