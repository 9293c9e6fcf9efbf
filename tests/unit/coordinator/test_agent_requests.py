"""What the ranks of a job on several hosts get to know about each other."""

from dataclasses import replace

import pytest

from coordinator.agents.requests import group_request, host_place, pending_requests
from coordinator.decide.fold_agent import place
from coordinator.decide.state.job import GroupSnapshot, JobSnapshot
from coordinator.decide.state.rank import Attempt, Membership
from coordinator.persistence import Attachment
from coordinator.tracked_job import TrackedJob
from muster.contracts.agent import LOCAL_HOST, UNPLACED
from muster.contracts.messages.rank import Ready
from muster.contracts.rank import ProcessState
from tests.support.stories import queued_job

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def job_on(*hosts: str, names: tuple[str, ...] = ("a", "b", "c")) -> JobSnapshot:
    """Return a job with a rank on each of these hosts."""
    job = queued_job(names, world_size=len(hosts), mode="synchronous")
    for rank, host in zip(job.ranks, hosts, strict=True):
        ready = Attempt(member=Membership(ready=Ready(port=100 + rank.rank)))
        job = job.with_rank(replace(rank, attempt=ready))
        if host != UNPLACED:
            job = place(job, job.ranks[rank.rank], host)
    return job


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ("aab", ["0/2 0/2", "1/2 0/2", "0/1 1/2"]),
        ("bab", ["0/2 1/2", "0/1 0/2", "1/2 1/2"]),
        ("cc", ["0/2 0/1", "1/2 0/1"]),
        ("cab", ["0/1 2/3", "0/1 0/3", "0/1 1/3"]),
    ],
)
def test_ranks_are_counted_on_each_host(hosts: str, places: list[str]) -> None:
    found = [host_place(job_on(*hosts), rank, ADDRESSES) for rank in range(len(hosts))]
    assert places == [
        f"{it.local_rank}/{it.local_world_size} {it.group_rank}/{it.group_world_size}"
        for it in found
    ]
    assert {it.host_count for it in found} == {3}
    assert {it.master_address for it in found} == {ADDRESSES[hosts[0]]}


def test_only_host_is_reached_by_loopback() -> None:
    job = job_on(LOCAL_HOST, LOCAL_HOST, names=(LOCAL_HOST,))
    place = host_place(job, 1, {LOCAL_HOST: "10.0.0.1"})
    assert (place.local_rank, place.host_count, place.master_address) == (1, 1, "127.0.0.1")


def test_group_names_the_hosts_and_addresses_of_its_members() -> None:
    group = GroupSnapshot(round=4, workers=(5, 6, 7), ranks=(0, 1, 2), attempts=(0, 0, 0))
    job = replace(job_on("a", "b", UNPLACED), group=group)
    tracked = TrackedJob(snapshot=job, attachment=Attachment(started_at=None))
    request = group_request(tracked, ADDRESSES)
    assert [(it.host, it.address, it.port) for it in request.group.members] == [
        ("a", "10.0.0.1", 100),
        ("b", "10.0.0.2", 101),
        (UNPLACED, "127.0.0.1", 102),
    ]
    assert request == group_request(tracked, ADDRESSES)


def test_a_job_that_is_not_prepared_starts_no_rank() -> None:
    job = job_on("a")
    spawned = Attempt(number=0, process=ProcessState.SPAWNED)
    job = job.with_rank(replace(job.ranks[0], attempt=spawned))
    tracked = TrackedJob(snapshot=job, attachment=Attachment(started_at=None))
    assert not list(pending_requests(tracked, "a", ADDRESSES))
