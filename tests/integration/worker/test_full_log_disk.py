"""The log of agent and warden is on a full disk: nothing that they have to do is left undone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_stage import DEADLINE_SECONDS, GENERATION, Conversation, Stage
from installation import without_ours

from muster.contracts.endings import REPLACED_CODE
from muster.contracts.environ import MARK
from muster.contracts.messages import Dismiss, Orphaned, RankExited, RankSpawned, StartRank

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


def test_ends_that_cannot_be_recorded_are_told_and_the_agent_goes_on(
    stage: Stage, full: int
) -> None:
    stage.start_agent(log=full)
    agent = stage.meet()
    if stage.files.exits.exists():
        stage.files.exits.rmdir()
    stage.files.exits.touch()  # as good as a full disk: no record can be written there
    for rank, code in enumerate((0, 64)):
        agent.say(stage.order(["sh", "-c", f"exit {code}"], rank=rank))
        exited = agent.hear_of(RankExited, rank)
        assert isinstance(exited, RankExited)
        assert exited.exit_code == code
    # A coordinator that comes later hears of them from memory.
    later = stage.meet(2)
    later.hear_of(RankExited, 0)
    later.say(Dismiss())
    assert stage.exit_code() == 0


def test_an_orphan_asks_its_ranks_to_exit(stage: Stage, full: int) -> None:
    stage.start_agent(log=full, orphan_timeout_seconds=1.0)
    agent = stage.meet()
    started(agent, stage.order(FOREVER))
    stage.meet_nobody()
    agent.close()
    assert stage.exit_code() == 0
    assert stage.running(rank=0) == []
    assert any(isinstance(said.message, Orphaned) for said in stage.record(0, 0).said)


def test_an_agent_with_a_successor_ends_what_is_left(stage: Stage, full: int) -> None:
    stage.start_agent(log=full)
    started(stage.meet(), stage.order(FOREVER))
    stage.files.agent_socket(GENERATION + 1).touch()
    assert stage.exit_code() == REPLACED_CODE
    assert stage.running(rank=0) == []


def test_an_agent_without_a_socket_for_its_ranks_starts_them(stage: Stage, full: int) -> None:
    occupied = stage.files.agent_socket(GENERATION)
    (occupied / "is a directory").mkdir(parents=True)
    stage.start_agent(log=full)
    started(stage.meet(), stage.order(FOREVER))


def test_a_warden_ends_the_orphans(stage: Stage, full: int) -> None:
    environment = {**without_ours(os.environ), MARK: f"{stage.uid}/0/0"}
    with subprocess.Popen(FOREVER, env=environment, start_new_session=True) as orphan:
        warden = [sys.executable, "-P", "-m", "worker.warden", stage.uid, "5.0"]
        done = subprocess.run(
            warden, stdout=full, stderr=full, check=False, timeout=DEADLINE_SECONDS
        )
        assert done.returncode == 0
        assert orphan.poll() is not None
