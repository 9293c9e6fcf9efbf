"""What a person sees on a terminal of 80 columns: the line of a job, and ``muster top``."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from cli.errors import ExitCode
from database.records import Event, utc_now
from muster.contracts.job.status import JobId, JobStatus, Reason
from tests.support.api_service import Agent, Service, StandIn
from tests.support.database_samples import worker
from tests.support.screens import COLUMNS, Screen

Opened = Callable[..., Screen]
Muster = Callable[..., Result]


@pytest.fixture
def screen(service: Service, tmp_path: Path) -> Iterator[Opened]:
    def opened(*words: str, **environment: str) -> Screen:
        environment = {"MUSTER_URL": service.url, **environment}
        screen = Screen(*words, environment=environment, directory=tmp_path)
        screens.append(screen)
        return screen

    screens: list[Screen] = []
    yield opened
    for screen in screens:
        screen.__exit__()


def test_progress_line_shows_step_or_reason(
    screen: Opened, stand_in: StandIn, elastic: str
) -> None:
    far = worker(0, step=123_456, total_steps=1_234_560, throughput_steps_per_sec=123.4, loss=0.5)
    stand_in.move(elastic, workers=(far,))
    watching = screen("wait", elastic)
    watching.see(r"RUNNING  step 123456/1234560  loss 0\.5000  123\.4/s  ETA 2h30m  1/4 ranks")
    lost = "rank 1 was ended by signal 9 (SIGKILL); restart 1 of 3 after a crash, as it happens"
    stand_in.move(elastic, JobStatus.RECOVERING, message=f"{lost}\n  the end of its log")
    watching.see("RECOVERING  123456/1234560  1/4 ranks  rank 1 was ended by signal")
    stand_in.move(elastic, JobStatus.PAUSED, message="too few ranks")
    watching.see("PAUSED  step 123456/1234560  1/4 ranks  too few ranks")
    stand_in.move(elastic, JobStatus.RUNNING, JobStatus.COMPLETED, message="all is well")
    assert watching.end() == 0
    *drawn, _end = watching.drawings()
    assert max(map(len, drawn)) < COLUMNS


def test_queued_job_says_what_it_waits_for(screen: Opened, stand_in: StandIn, job: str) -> None:
    stand_in.move(job, JobStatus.QUEUED, message="waits for 2 of 4 slots; 1 is free")
    watching = screen("wait", job)
    watching.see("QUEUED  0/2 ranks  waits for 2 of 4 slots; 1 is free")
    watching.type("\x03")
    assert watching.end() == ExitCode.INTERRUPTED
    assert f"attach again:  muster wait {job}" in watching.written


def test_sigterm_detaches_like_ctrl_c(screen: Opened, job: str) -> None:
    watching = screen("wait", job)
    watching.see("QUEUED  0/2 ranks")
    watching.process.terminate()
    assert watching.end() == ExitCode.INTERRUPTED
    assert f"detached: {job} continues" in watching.written


def test_logs_of_a_queued_job_say_why_it_waits(screen: Opened, stand_in: StandIn, job: str) -> None:
    words = "waits for 2 of 4 slots; 1 is free"
    stand_in.move(job, JobStatus.QUEUED, message=words, reason=Reason.WAITING_FOR_SLOTS)
    following = screen("logs", "-f", job)
    following.see("QUEUED: waits for 2 of 4 slots; 1 is free")
    following.type("\x03")
    following.end()


def test_colours_are_for_a_terminal_without_no_color(
    screen: Opened, stand_in: StandIn, agent: Agent, muster: Muster, job: str
) -> None:
    stand_in.run(job, worker(0))
    agent.write(job, 0, "a\n")
    stand_in.write(job, events=[Event(at=utc_now(), kind="job_running", message="runs")])
    for words in (["logs", job], ["events", job], ["ps", "-s", "RUNNING"]):
        coloured, plain = screen(*words), screen(*words, NO_COLOR="1")
        assert (coloured.end(), plain.end()) == (0, 0)
        assert "\x1b[3" in coloured.written
        assert "\x1b" not in plain.written + muster(*words).stdout


def test_ps_fits_the_terminal(
    screen: Opened, stand_in: StandIn, muster: Muster, client: httpx.Client
) -> None:
    job = client.post("/jobs", json={"world_size": 2, "command": ["true"]}).json()["job_id"]
    rank = worker(0, step=123_456, total_steps=999_999, throughput_steps_per_sec=123.4, loss=0.5)
    stand_in.run(job, rank)
    listing = screen("ps", "-s", "RUNNING", NO_COLOR="1")
    assert listing.end() == 0
    header, *rows = listing.written.splitlines()
    assert "steps/s" not in header
    assert max(map(len, rows)) <= COLUMNS
    assert any(row.startswith(f"{job}  RUNNING") for row in rows)
    assert "steps/s" in muster("ps").stdout, "programs read all columns"
    stand_in.end(job)


def test_message_comes_below_the_progress_line(screen: Opened, job: str) -> None:
    watching = screen("wait", job, "--timeout", "0.1")
    assert watching.end() == ExitCode.TIMED_OUT
    drawn, said = watching.drawings()
    assert "QUEUED  0/2 ranks" in drawn
    assert said == f"muster: {job} is QUEUED after 0.1 s of waiting: it goes on"


@pytest.mark.parametrize("key", ["\x03", "q"])
def test_top_ends_with_a_key_and_restores_the_terminal(screen: Opened, key: str) -> None:
    top = screen("top")
    before = top.modes()
    top.see("q ends this and no job")
    assert top.modes() != before
    top.type(key)
    assert top.end() == 0
    assert top.modes() == before


def test_top_updates_until_its_end(
    screen: Opened, stand_in: StandIn, service: Service, elastic: str
) -> None:
    top = screen("top", "--interval", "0.2")
    top.see(rf"{elastic[:4]}.*{elastic[-4:]} +RUNNING +0/4")
    stand_in.move(elastic, workers=(worker(0, step=7, total_steps=10, loss=0.25),))
    top.see(r"RUNNING +1/4 +7/10 +0\.2500")
    service.end(signal.SIGKILL)
    top.see("as of [0-9]+s ago: no answer")
    service.start()
    stand_in.move(elastic, workers=(worker(0, step=8, total_steps=10, loss=0.25),))
    top.see(r"RUNNING +1/4 +8/10 +0\.2500")
    top.type("q")
    assert top.end() == 0


def test_purge_deletes_only_after_confirmation(
    screen: Opened, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "x" * 1000)
    stand_in.run(job)
    stand_in.move(job, status := JobStatus.FAILED)
    left = screen("purge", "--status", status)
    left.see(r"Delete \d+ jobs?, [0-9.]+ (Ki)?B\? \[y/N\]: ")
    assert left.interrupt() == ExitCode.INTERRUPTED
    assert "Aborted" not in left.written
    refused = screen("purge", "--status", status)
    refused.see(r"\[y/N\]: ")
    refused.type("n\n")
    assert refused.end() == ExitCode.FAILED
    assert refused.drawings()[-1] == "nothing is deleted"
    assert stand_in.jobs.find(JobId(job))
    meant = screen("purge", "--status", status)
    meant.see(r"\[y/N\]: ")
    meant.type("y\n")
    assert meant.end() == 0
    assert not stand_in.jobs.find(JobId(job))
    asked_for_nothing = screen("purge", "--status", status)
    assert asked_for_nothing.end() == 0
    assert asked_for_nothing.drawings() == ["nothing to delete: no matching job has ended"]


def test_purge_asks_again_about_new_matches(
    screen: Opened, client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    other = f"{job}-2"
    client.post("/jobs", json={"job_id": other}).raise_for_status()
    stand_in.end(job)
    asking = screen("purge", "--status", stand_in.jobs.get(JobId(job)).status)
    asking.see(r"Delete \d+ jobs?, .*\? \[y/N\]: ")
    stand_in.end(other)
    asking.type("y\n")
    asking.see(r"more jobs match now")
    asking.see(r"Delete \d+ jobs, .*\? \[y/N\]: ")
    asking.type("n\n")
    assert asking.end() == ExitCode.FAILED
    assert all(stand_in.jobs.find(JobId(one)) for one in (job, other))


def test_purge_force_says_that_it_kills(screen: Opened, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    asking = screen("purge", "--status", "RUNNING", "--force")
    asking.see(r"Delete 1 job, [^,]*, and kill those that still run\?")
    asking.interrupt()
    asking = screen("purge", "--status", "RUNNING", "--force", "--delete-checkpoints")
    asking.see("Delete 1 job, .*, with their checkpoints, and kill those that still run")
    asking.interrupt()
    asking = screen("purge", "--status", "RUNNING")
    asking.see("nothing to delete: no matching job has ended, 1 job skipped")
    assert asking.end() == 0


def test_secret_prompt_hides_the_value(screen: Opened) -> None:
    typing = screen("secret", "set", "typed")
    typing.see(r"value of typed \(it is not shown\): ")
    assert typing.interrupt() == ExitCode.INTERRUPTED
    assert "Aborted" not in typing.written
