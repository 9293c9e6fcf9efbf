"""Many jobs at once: they run in the order of submission, and all complete."""

import signal
from functools import partial

import pytest

from muster.host.containment import tagged_processes
from tests.support.installation import SLOTS, Installation, Seen, await_value, is_over


def test_twenty_jobs_at_once_all_complete_in_order(narrow: Installation) -> None:
    commands: list[dict[str, object]] = [{}, *[{"command": ["true"]}] * 4]
    jobs = [narrow.submit(world_size=1, **kind) for kind in commands * 4]
    await_value(partial(all_are_over_and_few_run, narrow), lambda: str(narrow.see_all()))
    for job_id in jobs:
        narrow.complete(job_id)
    started = [narrow.job(job_id)["started_at"] for job_id in jobs]
    assert started == sorted(started)


def test_a_queued_job_says_why_and_keeps_its_place(narrow: Installation) -> None:
    holder = narrow.submit(world_size=3, command=["sleep", "60"])
    narrow.wait_until(holder, holds_slots)
    large = narrow.submit(world_size=2, command=["true"])
    small = narrow.submit(world_size=1, command=["true"])
    seen = narrow.wait_until(large, lambda now: now["reason"])
    assert (seen["status"], seen["reason"]) == ("QUEUED", "waiting_for_slots")
    assert seen["message"] == (
        f"waits for 2 of 4 slots (MUSTER_SLOTS); 1 is free, {holder} holds the others"
    )
    seen = narrow.wait_until(small, lambda now: now["reason"])
    assert seen["message"] == "waits for 1 of 4 slots; 1 job is ahead of it"
    narrow.stop(holder)
    for job_id in (large, small):
        narrow.complete(job_id)


def test_a_job_larger_than_all_slots_runs_alone(narrow: Installation) -> None:
    first = narrow.submit(world_size=1, command=["true"])
    huge = narrow.submit(world_size=SLOTS + 2, command=["true"])
    narrow.complete(first)
    narrow.complete(huge)
    (ended,) = [event for event in narrow.events(first) if event["kind"] == "rank_exited"]
    started = [event for event in narrow.events(huge) if event["kind"] == "rank_started"]
    assert len(started) == SLOTS + 2
    assert all(ended["at"] < event["at"] for event in started)


def test_a_job_that_waits_can_be_stopped(narrow: Installation) -> None:
    holder = narrow.submit(world_size=SLOTS, command=["sleep", "60"])
    waiting = narrow.submit(world_size=1)
    narrow.wait_until(waiting, lambda now: now["reason"])
    narrow.stop(waiting)
    seen = narrow.wait_until(waiting, is_over)
    assert (seen["status"], seen["reason"]) == ("STOPPED", "stopped_by_user")
    assert not is_over(narrow.see(holder))


@pytest.mark.parametrize("kind", [{}, {"command": ["sleep", "60"]}], ids=["program", "command"])
def test_deleting_a_job_during_its_agent_start_leaves_nothing(
    narrow: Installation, kind: dict[str, object]
) -> None:
    deleted = narrow.submit(world_size=SLOTS, **kind)
    uid = narrow.uids[deleted]
    await_value(lambda: tagged_processes(f"{uid}/agent"), lambda: narrow.describe(deleted))
    answer = narrow.request("DELETE", f"/jobs/{deleted}", params={"force": True})
    assert answer.is_success, answer.text
    narrow.forget(deleted)
    await_value(lambda: not narrow.running_processes(), lambda: str(narrow.tagged()))
    assert not narrow.files.job(deleted).root.exists(), "the directory was created again"


def test_a_service_ended_during_an_agent_start_leaves_nothing(narrow: Installation) -> None:
    interrupted = narrow.submit(world_size=1, command=["true"])
    agent = f"{narrow.uids[interrupted]}/agent"
    await_value(lambda: tagged_processes(agent), lambda: narrow.describe(interrupted))
    assert narrow.coordinator.end(signal.SIGINT) == 0
    assert not narrow.running_processes()
    assert "agent_lost" not in narrow.kinds(interrupted), "it was not needed any more"
    narrow.coordinator.start()
    narrow.complete(interrupted)


def test_jobs_sent_while_no_coordinator_runs_wait_for_one(narrow: Installation) -> None:
    narrow.coordinator.end(signal.SIGKILL)
    jobs = [narrow.submit(world_size=1, command=["true"]) for _ in range(2)]
    assert {narrow.see(job_id)["status"] for job_id in jobs} == {"QUEUED"}
    narrow.coordinator.start()
    for job_id in jobs:
        narrow.complete(job_id)


def all_are_over_and_few_run(narrow: Installation) -> bool:
    seen = narrow.see_all()
    assert sum(map(holds_slots, seen)) <= SLOTS
    return all(map(is_over, seen))


def holds_slots(seen: Seen) -> bool:
    return seen["status"] not in {"QUEUED", "COMPLETED", "STOPPED"}
