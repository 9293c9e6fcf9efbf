"""Files of a job are edited while it runs: no rank trains other code unnoticed."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.installation import TOGETHER, Installation, Seen, is_over, is_running, pids

PROGRAM = """
import importlib, os, sys
import numpy as np
sys.path.append("elsewhere")  # as an editable install does
import layer, package
from muster.program import Contribution

class Model:
    def initial(self, seed):
        return {"weights": np.zeros(8, np.float32)}

    def gradient(self, state, batch, random):
        if os.path.exists("go"):
            importlib.import_module("later")
        total = np.ones(8, np.float32) * len(batch.samples) * layer.RATE
        return Contribution({"weights": total.astype(np.float32)}, loss=1.0)

    def update(self, state, gradients, step):
        return {"weights": state["weights"] + gradients["weights"]}
"""


class Project:
    """A directory with a program and its modules, and a job that trains it."""

    def __init__(self, installation: Installation, directory: Path) -> None:
        self.installation = installation
        self.directory = directory
        (directory / "elsewhere").mkdir()
        self.write("train.py", PROGRAM)
        self.write("layer.py", "RATE = 1\n")
        self.write("later.py", "RATE = 1\n")
        self.write("elsewhere/package.py", "RATE = 1\n")

    def write(self, name: str, text: str) -> None:
        """Replace a file at once: a rank that starts meanwhile must not read an empty one."""
        draft = self.directory / f"{name}.draft"
        draft.write_text(text)
        draft.replace(self.directory / name)

    def submit(self, **fields: object) -> str:
        wanted = {**TOGETHER, "program": "train.py:Model", "world_size": 2, "spare_ranks": 0}
        fields = {"working_dir": str(self.directory), **wanted, **fields}
        return self.installation.submit(**fields)

    def trains(self, job_id: str) -> Seen:
        return self.installation.wait_until(job_id, lambda it: is_running(it) and it["step"] > 1)

    def is_replaced(self, job_id: str, rank: int = 1) -> None:
        """Kill a rank, and wait until another process trains in its place."""
        killed = self.installation.kill(job_id, rank)
        self.installation.wait_until(
            job_id, lambda it: is_running(it) and pids(it)[rank] not in {killed, None}
        )

    def is_killed_until_it_fails(self, job_id: str) -> None:
        """Kill a rank again and again: a spare process may have loaded the code of the job."""
        while not is_over(
            seen := self.installation.wait_until(
                job_id, lambda it: is_over(it) or (is_running(it) and pids(it)[1])
            )
        ):
            with suppress(ProcessLookupError):
                os.kill(pids(seen)[1], signal.SIGKILL)

    def fails(self, job_id: str, name: str) -> None:
        """Wait until the job fails because of a file, and has saved before."""
        job = self.installation.fail(job_id)
        assert job["reason"] == "code_changed", self.installation.describe(job_id)
        assert f"{self.directory / name} (sha256 " in job["message"]
        assert self.installation.see(job_id)["last_checkpoint_step"]


@pytest.fixture
def project(installation: Installation, tmp_path: Path) -> Project:
    return Project(installation, tmp_path)


def told(installation: Installation, job_id: str) -> Sequence[str]:
    return [it["message"] for it in installation.events(job_id) if it["kind"] == "code_changed"]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("name", ["train.py", "layer.py", "elsewhere/package.py"])
def test_a_rank_with_edited_code_never_trains(project: Project, name: str, spares: int) -> None:
    job_id = project.submit(spare_ranks=spares)
    project.trains(job_id)
    project.write(name, (project.directory / name).read_text() + "\nEDITED = 1\n")
    project.is_killed_until_it_fails(job_id)
    project.fails(job_id, name)


def test_a_module_imported_late_is_compared(project: Project) -> None:
    job_id = project.submit()
    project.trains(job_id)
    project.write("later.py", "RATE = 2\n")
    project.write("go", "")
    project.fails(job_id, "later.py")


def test_files_that_no_rank_runs_are_no_alarm(project: Project) -> None:
    project.write("other.py", "")
    job_id = project.submit()
    project.trains(job_id)
    for name in ("other.py", "notes.ipynb", "train.log", "weights.pt"):
        project.write(name, "changed\n")
    os.utime(project.directory / "layer.py")
    project.is_replaced(job_id)
    assert told(project.installation, job_id) == []


def test_any_code_goes_on_with_an_event(project: Project) -> None:
    job_id = project.submit(code="any")
    project.trains(job_id)
    project.write("layer.py", "RATE = 2\n")
    project.is_replaced(job_id)
    (words,) = told(project.installation, job_id)
    assert f"{project.directory}/layer.py (sha256 " in words
    assert words.startswith("rank 1 has other code than its job, and goes on: ")


def test_a_taken_over_job_still_knows_its_code(project: Project) -> None:
    job_id = project.submit()
    project.trains(job_id)
    project.installation.coordinator.end(signal.SIGKILL)
    project.write("elsewhere/package.py", "RATE = 2\n")
    project.installation.coordinator.start()
    project.is_killed_until_it_fails(job_id)
    project.fails(job_id, "elsewhere/package.py")


def test_a_job_edited_in_the_queue_takes_the_new_code(project: Project) -> None:
    installation = project.installation
    ahead = installation.submit(world_size=64, command=["sleep", "600"])
    job_id = project.submit()
    installation.wait_until(job_id, lambda it: it["message"])
    project.write("layer.py", "RATE = 2\n")
    project.write("other.py", "RATE = 2\n")
    installation.stop(ahead, grace_seconds=0)
    project.trains(job_id)
    (words,) = told(installation, job_id)
    assert words.startswith(
        f"edited before this start, which takes it as it is: {project.directory}"
    )
    assert "layer.py" in words
    project.is_replaced(job_id)


def test_an_interrupted_job_is_compared_when_it_starts_again(project: Project) -> None:
    job_id = project.submit()
    project.trains(job_id)
    assert project.installation.coordinator.end(signal.SIGINT) == 0
    project.write("train.py", f"{PROGRAM}\n")
    project.installation.coordinator.start()
    project.fails(job_id, "train.py")
    second = project.submit(resume_from=job_id)  # by hand: it takes what is there
    project.trains(second)
    words = f"goes on from job {job_id} with the code as it is now"
    assert words in [it["message"] for it in project.installation.events(second)]


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"], ["train.sh"]])
def test_other_code_of_a_command_is_an_event(project: Project, words: list[str]) -> None:
    project.write("train.py", "import time; time.sleep(600)\n")
    project.write("train.sh", "sleep 600\n")
    program = "sh" if words == ["train.sh"] else sys.executable
    job_id = project.submit(mode="independent", program=None, command=[program, *words])
    project.installation.wait_until(job_id, is_running)
    name = "train.sh" if words == ["train.sh"] else "train.py"
    project.write(name, f"{(project.directory / name).read_text()}\n")
    for rank in (0, 1):
        project.is_replaced(job_id, rank)
    (told_of,) = told(project.installation, job_id)
    assert f"has other code than its job, and goes on: {project.directory / name}" in told_of


def test_a_snapshot_runs_the_code_of_its_submission(project: Project) -> None:
    installation = project.installation
    job_id = project.submit(code="snapshot")
    project.trains(job_id)
    for name in ("train.py", "layer.py"):
        project.write(name, "raise SystemExit('edited')\n")
    project.is_replaced(job_id)
    assert told(installation, job_id) == []
    copy = installation.files.snapshot(installation.uids[job_id])
    assert (copy / "layer.py").read_text() == "RATE = 1\n"
    project.write("elsewhere/package.py", "RATE = 2\n")
    project.is_killed_until_it_fails(job_id)
    project.fails(job_id, "elsewhere/package.py")  # imported from the working directory
    assert installation.request("DELETE", f"/jobs/{job_id}").is_success
    installation.forget(job_id)
    assert not copy.exists()


@pytest.mark.parametrize("words", [["app/main.py", "x"], ["-u", "-m", "app.main", "x"]])
def test_a_snapshot_of_a_command_keeps_its_directory(project: Project, words: list[str]) -> None:
    (project.directory / "app").mkdir()
    text = "import os, sys, time, near\nwhile not os.path.exists('go'): time.sleep(0.05)\n"
    project.write("app/main.py", f"{text}print(near.WORD, os.getcwd(), sys.argv[1:])\n")
    for place in ("app/", ""):
        project.write(f"{place}near.py", "WORD = 'old'\n")
    fields = {"mode": "independent", "program": None, "command": [sys.executable, *words]}
    job_id = project.submit(**fields, world_size=1, code="snapshot")
    for place in ("app/", ""):
        project.write(f"{place}near.py", "WORD = 'new'\n")
    project.write("go", "")
    project.installation.complete(job_id)
    assert project.installation.log(job_id) == f"old {project.directory} ['x']\n"


def test_a_large_snapshot_is_refused(project: Project) -> None:
    for name, size in (("a.bin", 3 << 20), ("b.bin", 2 << 20), ("c.bin", 1 << 20), ("d.bin", 9)):
        project.write(name, size * "x")
    (project.directory / ".git").mkdir()
    project.write(".git/pack", (9 << 20) * "x")
    body = {"mode": "synchronous", "program": "train.py:Model", "code": "snapshot"}
    body |= {"working_dir": str(project.directory)}
    place = project.installation.files.snapshot("of a job").parent
    before = set(place.glob("*"))
    for path in ("/jobs", "/jobs?dry_run=true"):
        answer = project.installation.request("POST", path, json=body)
        assert answer.status_code == 422
        assert "a.bin (3 MiB), b.bin (2 MiB), c.bin (1 MiB)" in answer.text
    assert set(place.glob("*")) == before
