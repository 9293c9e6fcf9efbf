"""The agent's log is on a full disk, which must not keep it from anything."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.contracts.messages import Dismiss, Orphaned, RankExited, RankSpawned, StartRank
from muster.contracts.retry import REPLACED_CODE
from tests.support.agent_stage import GENERATION, Conversation, Stage

FOREVER = ("sleep", "600")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def full() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def started(agent: Conversation, order: StartRank) -> None:
    agent.say(order)
    assert isinstance(agent.hear_of(RankSpawned, order.rank), RankSpawned)


def test_exits_that_cannot_be_recorded_are_reported(stage: Stage, full: int) -> None:
    stage.start_agent(log=full)
    agent = stage.meet()
    if stage.files.exits.exists():
        stage.files.exits.rmdir()
    stage.files.exits.touch()  # no record can be written there
    for rank, code in enumerate((0, 64)):
        agent.say(stage.order(["sh", "-c", f"exit {code}"], rank=rank))
        exited = agent.hear_of(RankExited, rank)
        assert isinstance(exited, RankExited)
        assert exited.exit_code == code
    # A later coordinator gets them from memory.
    later = stage.meet(2)
    later.hear_of(RankExited, 0)
    later.say(Dismiss())
    assert stage.exit_code() == 0


def test_an_orphaned_agent_stops_its_ranks(stage: Stage, full: int) -> None:
    stage.start_agent(log=full, orphan_timeout_seconds=1.0)
    agent = stage.meet()
    started(agent, stage.order(FOREVER))
    stage.meet_nobody()
    agent.close()
    assert stage.exit_code() == 0
    assert stage.running(rank=0) == []
    assert any(isinstance(said.message, Orphaned) for said in stage.record(0, 0).said)


def test_a_replaced_agent_kills_its_ranks(stage: Stage, full: int) -> None:
    stage.start_agent(log=full)
    started(stage.meet(), stage.order(FOREVER))
    stage.files.agent_socket(GENERATION + 1).touch()
    assert stage.exit_code() == REPLACED_CODE
    assert stage.running(rank=0) == []


def test_an_agent_without_a_socket_starts_ranks(stage: Stage, full: int) -> None:
    occupied = stage.files.agent_socket(GENERATION)
    (occupied / "is a directory").mkdir(parents=True)
    stage.start_agent(log=full)
    started(stage.meet(), stage.order(FOREVER))
