"""Every log line has one form, and a line that cannot be written stops no service."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOGGING = """
import logging, structlog
from muster.runtime.service_log import configure
configure("coordinator")
structlog.get_logger().info("a rank died", action="rank_exited", rank=3)
structlog.get_logger().info("a job is over", action="job_over", rank=None)
logging.getLogger("a.library").warning("watch out: %s", "ü")
structlog.get_logger().debug("below the level")
"""


@pytest.mark.slow
def test_every_line_is_a_json_object_with_its_service() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, check=True, timeout=60
    )
    ours, without_rank, theirs = map(json.loads, done.stderr.splitlines())
    assert (ours["event"], ours["action"], ours["rank"]) == ("a rank died", "rank_exited", 3)
    assert (ours["service"], ours["level"]) == ("coordinator", "info")
    assert ours["timestamp"].endswith("Z")
    assert without_rank.keys() == ours.keys() - {"rank"}
    assert (theirs["event"], theirs["level"]) == ("watch out: ü", "warning")
    assert theirs["service"] == "coordinator"
    assert done.stdout == b""


FAIL = """
import structlog
from muster.runtime.service_log import configure
def fail_with(secret):
    raise ValueError("no such file")
configure("api")
try:
    fail_with("".join(["hunter2", "secret"]))
except ValueError:
    structlog.get_logger().exception("a request failed")
"""


@pytest.mark.slow
def test_a_traceback_on_a_terminal_shows_no_values() -> None:
    ours, theirs = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", FAIL], stderr=theirs, check=True, timeout=60)
        output = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "a request failed" in output
    assert "ValueError: no such file" in output
    assert "hunter2secret" not in output


@pytest.mark.slow
def test_a_full_disk_does_not_change_the_exit_code() -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    program = [sys.executable, "-c", f"{LOGGING}\nraise SystemExit(75)"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(program, stderr=full, env=environment, check=False, timeout=60)
    assert done.returncode == 75
