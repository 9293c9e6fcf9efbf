"""A warden is known to be at work from the moment it asks, and not while it makes ready to."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from muster.contracts.environ import MARK
from muster.processes import marked
from worker.warden import is_at_work

HEARS = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.02; done"


@contextmanager
def started(mark: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_warden_that_is_still_being_loaded_has_asked_nobody() -> None:
    uid = uuid4().hex
    loading = ("-P", "-c", "input()", "worker.warden", uid, "600.0")
    with started(f"{uid}/warden", sys.executable, *loading):
        assert len(marked(f"{uid}/warden")) == 1
        assert not is_at_work(uid)


def test_a_warden_that_has_asked_is_at_work_until_it_ends() -> None:
    uid = uuid4().hex
    with started(f"{uid}/0/0", "/bin/sh", "-c", HEARS) as rank:
        assert line_of(rank) == b"ready\n"
        at_work = ("-P", "-m", "worker.warden", uid, "600.0")
        with started(f"{uid}/warden", sys.executable, *at_work):
            assert line_of(rank) == b"asked\n"
            assert is_at_work(uid)
        assert not is_at_work(uid)
