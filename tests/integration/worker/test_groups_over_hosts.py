"""Ranks of two agents, as on two hosts, train one model: over TCP, or by shared memory on one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from muster.contracts.messages.agent import AnnounceGroup, RankDied, RankSpawned
from muster.contracts.messages.rank import GroupMember, Ready, Saved, WorkerGroup
from muster.contracts.settings.environ import HostPlace
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from tests.support.agent_stage import Conversation, Stage
from tests.support.takeovers import TOGETHER, announced, receive_said


class Host(NamedTuple):
    """A stage, its agent's conversation, and where members of other hosts reach its ranks."""

    stage: Stage
    agent: Conversation
    address: str


class Rank(NamedTuple):
    host: Host
    pid: int
    attempt: int
    member: GroupMember


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    names = {"first": "127.0.0.1", "second": "127.0.0.2"}
    hosts = []
    for name, address in names.items():
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name / "shards", synthetic(samples=64, shards=4))
        stage = Stage(tmp_path / name, host=name)
        stage.start_agent(is_managed=True)
        hosts.append(Host(stage, stage.meet(), address))
    yield hosts
    for host in hosts:
        host.stage.close()


def start(job: Stage, host: Host, number: int, attempt: int = 0) -> Rank:
    """Start a rank of the job on a host, and return it when it is ready."""
    place = HostPlace(local_rank=0, local_world_size=1, host_count=2)
    host.agent.say(job.order(None, rank=number, attempt=attempt, place=place, **TOGETHER))
    spawned = host.agent.receive_of(RankSpawned, number)
    ready = receive_said(host.agent, number, Ready, lambda _: True)
    member = GroupMember(
        worker_id=number + 10 * attempt,
        rank=number,
        host=host.stage.host,
        address=host.address,
        port=ready.port,
    )
    return Rank(host, spawned.pid, attempt, member)


def train(hosts: list[Host], round_number: int, *ranks: Rank) -> Saved:
    """Publish a group of these ranks, and return its first checkpoint: all have taken a step."""
    members = tuple(rank.member for rank in ranks)
    group = WorkerGroup(round=round_number, token="", members=members, paused=False)
    for host in hosts:
        attempts = tuple(rank.attempt for rank in ranks)
        host.agent.say(AnnounceGroup(group=group, attempts=attempts))
    first = ranks[0]
    return receive_said(
        first.host.agent, first.member.rank, Saved, lambda it: it.generation == round_number
    )


def shares_memory(rank: Rank, other: Rank) -> bool:
    return f"muster-arena-{other.member.rank} " in Path(f"/proc/{rank.pid}/maps").read_text()


def test_group_shrinks_to_one_host_and_grows_with_the_same_bits(
    hosts: list[Host], tmp_path: Path
) -> None:
    first, second = hosts
    job = first.stage
    zero, one, two = start(job, first, 0), start(job, first, 1), start(job, second, 2)
    saved = [train(hosts, 1, zero, one, two)]
    assert not shares_memory(zero, one)
    os.kill(two.pid, signal.SIGKILL)
    second.agent.receive_of(RankDied, 2)
    saved.append(train(hosts, 2, zero, one))
    assert shares_memory(zero, one)
    saved.append(train(hosts, 3, zero, one, start(job, second, 2, attempt=1)))
    assert digests_alone(tmp_path / "alone", saved) == [it.digest for it in saved]


def digests_alone(root: Path, saved: list[Saved]) -> list[str]:
    """Return the digests of the same steps of one rank that trains alone."""
    root.mkdir()
    write_dataset(root / "shards", synthetic(samples=64, shards=4))
    stage = Stage(root)
    try:
        stage.start_agent(is_managed=True)
        agent = stage.meet()
        agent.say(stage.order(None, **{**TOGETHER, "sleep_sec": 0.0}))
        receive_said(agent, 0, Ready, lambda _: True)
        agent.say(announced(1, 0))
        return [
            receive_said(agent, 0, Saved, lambda it, step=known.step: it.step == step).digest
            for known in saved
        ]
    finally:
        stage.close()
