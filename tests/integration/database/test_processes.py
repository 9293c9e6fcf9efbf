"""Real processes on one database: nothing is created twice, no acknowledged write is lost."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from database.engine import Database
from database.jobs import Jobs
from muster.contracts.job.status import JobId

CREATE_ONE = """
import sys
from database.engine import Database
from database.jobs import Jobs, NewJob
from muster.contracts.job.status import JobId, JobUid
from muster.contracts.job.spec import JobSpec
print("ready", flush=True)
sys.stdin.readline()
jobs = Jobs(Database.open(sys.argv[1]))
job_id = sys.argv[2]
(job,) = jobs.create([NewJob(JobId(job_id), JobUid(job_id), JobSpec())])
assert job.version == 1
"""

CREATE_FOR_EVER = """
import itertools, sys
from database.engine import Database
from database.jobs import Jobs, NewJob
from muster.contracts.job.status import JobId, JobUid
from muster.contracts.job.spec import JobSpec
jobs = Jobs(Database.open(sys.argv[1]))
for number in itertools.count():
    job_id = f"{sys.argv[2]}-{number}"
    (job,) = jobs.create([NewJob(JobId(job_id), JobUid(job_id), JobSpec())])
    assert job.version == 1
    print(job_id, flush=True)
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_open_a_fresh_database_at_once(fresh_url: str) -> None:
    names = ["api", "coordinator", "third"]
    processes = [started(CREATE_ONE, fresh_url, name) for name in names]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    database = Database.open(fresh_url)
    assert sorted(job.job_id for job in Jobs(database).unfinished()) == sorted(names)
    database.close()


@pytest.mark.parametrize("acknowledged", [1, 10])
def test_a_killed_process_loses_no_acknowledged_commit(tmp_path: Path, acknowledged: int) -> None:
    url = f"sqlite:///{tmp_path}/muster.db"
    Database.open(url).close()
    processes = [started(CREATE_FOR_EVER, url, name) for name in ("a", "b")]
    printed = [process.stdout.readline() for process in processes for _ in range(acknowledged)]
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        printed += process.stdout.readlines()  # includes what readline has read ahead
        process.communicate(timeout=60)
    database = Database.open(url)
    for line in printed:
        if line.endswith("\n"):
            assert Jobs(database).get(JobId(line.strip())).version == 1
    database.close()
    checked = sqlite3.connect(tmp_path / "muster.db")
    assert checked.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert checked.execute("PRAGMA foreign_key_check").fetchall() == []
    checked.close()
