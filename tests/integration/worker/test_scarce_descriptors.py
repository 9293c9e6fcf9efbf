"""An agent without a descriptor to spare: nobody is lost, and what cannot be done waits."""

import signal
from contextlib import AbstractContextManager

from agent_stage import Conversation, Stage
from installation import await_value
from scarcity import no_descriptors
from takeovers import FOREVER, TOGETHER, hear_said, started, taken_over

from muster.contracts.agent import AdoptedRank
from muster.contracts.messages import (
    Announce,
    KillRank,
    Layout,
    RankExited,
    RankSpawned,
    Ready,
    Seat,
    TerminateRank,
    TookUp,
)
from muster.processes import is_running, marked

SCARCE = """
import os, resource, sys
from worker import agent
serve = agent.Agent.run
def say_and_serve(self):
    print("it holds its ranks", flush=True)
    return serve(self)
agent.Agent.run = say_and_serve
lowest = os.dup(0)
os.close(lowest)
limit = lowest + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
sys.exit(agent.main())
"""
"""An agent with so many descriptors, for its selector and all the rest."""

SPARES = range(3, 15)
"""From an agent that has only just a selector to one that can do everything."""


def scarcity_of(stage: Stage) -> AbstractContextManager[None]:
    (agent,) = marked(f"{stage.uid}/agent")
    return no_descriptors(agent.pid)


def cannot_start(stage: Stage, agent: Conversation, rank: int) -> None:
    """Make sure that there are no descriptors, and that what was said before has been heard."""
    agent.say(stage.order(FOREVER, rank=rank))
    exited = agent.hear_of(RankExited, rank)
    assert isinstance(exited, RankExited)
    assert "Too many open files" in (exited.unstarted or "")


def test_a_layout_is_told_when_there_are_descriptors_again(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    agent = stage.meet()
    for rank in (0, 1):
        started(stage, agent, None, rank=rank, **TOGETHER)
        hear_said(agent, rank, Ready, lambda _: True)
    seats = tuple(Seat(worker_id=rank, rank=rank, host="", port=0) for rank in (0, 1))
    layout = Layout(generation=1, token="", seats=seats, paused=False)
    with scarcity_of(stage):
        agent.say(Announce(layout=layout, incarnations=(0, 0)))
        cannot_start(stage, agent, 2)
    hear_said(agent, 0, TookUp, lambda took_up: took_up.generation == 1)


def test_an_end_is_told_when_it_can_be_seen_what_it_has_left(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    rank = started(stage, agent, ["sh", "-c", "setsid sleep 601 & sleep 602"])
    await_value(lambda: len(stage.running(rank=0)) == 3, lambda: "it does not start what it is to")
    with scarcity_of(stage):
        agent.say(KillRank(rank=0, incarnation=0))
        await_value(lambda: not is_running(rank.process), lambda: "it was not killed")
        cannot_start(stage, agent, 1)
    exited = agent.hear_of(RankExited, 0)
    assert isinstance(exited, RankExited)
    assert exited.signal == signal.SIGKILL
    assert not stage.running(rank=0)


def sleepers(stage: Stage) -> list[AdoptedRank]:
    stage.start_agent()
    agent = stage.meet()
    return [started(stage, agent, list(FOREVER), rank=rank) for rank in (0, 1)]


def holds_its_ranks(stage: Stage, ranks: list[AdoptedRank], spare: int) -> bool:
    """Start an agent that adopts them; return whether it stays, else it has left them alone."""
    log = stage.root / f"agent.{spare}.log"
    with log.open("wb") as file:
        program = ("-c", SCARCE, str(spare))
        stage.start_agent(adopted=ranks, log=file.fileno(), program=program)
    words = await_value(log.read_text, lambda: "not a word of the agent")
    if words.startswith("it holds its ranks"):
        return True
    assert "leaves it to another one: [Errno 24] Too many open files" in words
    assert stage.exit_code() == 1
    return False


def test_an_agent_that_cannot_look_after_its_ranks_leaves_them_to_another_one(
    stage: Stage,
) -> None:
    """With however few descriptors, it holds both and can be reached, or nothing has happened."""
    ranks = sleepers(stage)
    stayed: list[bool] = []
    for epoch, spare in enumerate(SPARES, 2):
        stage.kill_agent()
        stayed.append(holds_its_ranks(stage, ranks, spare))
        if stayed[-1]:
            agent = stage.meet(epoch)
            for rank in (0, 1):
                assert isinstance(agent.hear_of(RankSpawned, rank), RankSpawned)
        assert all(is_running(rank.process) for rank in ranks)
    assert stayed == sorted(stayed)
    assert set(stayed) == {False, True}


def test_a_rank_whose_log_cannot_be_opened_is_looked_after(stage: Stage) -> None:
    ranks = sleepers(stage)
    stage.kill_agent()
    stage.files.times(0, 0).unlink()
    stage.files.times(0, 0).mkdir()
    agent = taken_over(stage, *ranks)
    for rank in (0, 1):
        agent.say(TerminateRank(rank=rank, incarnation=0))
        exited = agent.hear_of(RankExited, rank)
        assert isinstance(exited, RankExited)
        assert exited.signal == signal.SIGTERM
