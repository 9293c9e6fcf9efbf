import json
import os
import subprocess
import sys
from pathlib import Path

SPEAK = """
import logging, structlog
from muster.journal import configure
configure("coordinator")
structlog.get_logger().info("a rank died", action="rank_exited", rank=3)
structlog.get_logger().info("a job is over", action="job_over", rank=None)
logging.getLogger("somebody.else").warning("watch out: %s", "ü")
structlog.get_logger().debug("nobody wants to know")
"""


def test_every_line_is_one_json_object_with_its_service_whoever_speaks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAK], capture_output=True, check=True, timeout=60
    )
    ours, of_no_rank, theirs = map(json.loads, done.stderr.splitlines())
    assert (ours["event"], ours["action"], ours["rank"]) == ("a rank died", "rank_exited", 3)
    assert (ours["service"], ours["level"]) == ("coordinator", "info")
    assert ours["timestamp"].endswith("Z")
    assert of_no_rank.keys() == ours.keys() - {"rank"}
    assert (theirs["event"], theirs["level"]) == ("watch out: ü", "warning")
    assert theirs["service"] == "coordinator"
    assert done.stdout == b""


FAIL = """
import structlog
from muster.journal import configure
def open_with(key):
    raise ValueError("no such door")
configure("api")
try:
    open_with("".join(["hunter2", "secret"]))
except ValueError:
    structlog.get_logger().exception("a request failed")
"""


def test_a_terminal_shows_where_something_failed_and_no_values_of_variables() -> None:
    ours, theirs = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", FAIL], stderr=theirs, check=True, timeout=60)
        said = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "a request failed" in said
    assert "ValueError: no such door" in said
    assert "hunter2secret" not in said


def test_a_full_disk_costs_lines_and_not_the_exit_code() -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    speaker = [sys.executable, "-c", f"{SPEAK}\nraise SystemExit(75)"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(speaker, stderr=full, env=environment, check=False, timeout=60)
    assert done.returncode == 75
