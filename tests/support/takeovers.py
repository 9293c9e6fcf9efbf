"""Helpers for tests in which agents die."""

from collections.abc import Callable, Sequence

from muster.contracts.agent import LOCAL_HOST
from muster.contracts.messages.agent import AgentHello, AnnounceGroup, RankSaid, RankSpawned
from muster.contracts.messages.assignment import AdoptedRank
from muster.contracts.messages.rank import GroupMember, Heartbeat, RankMessage, WorkerGroup
from tests.support.agent_stage import Conversation, Stage, adopted

FOREVER = ("sleep", "600")
LONG = {"sleep_sec": 0.02, "epochs": 1000, "heartbeat_timeout": 1.0}
TOGETHER = {
    **LONG,
    "mode": "synchronous",
    "batch_size": 16,
    "virtual_shards": 8,
    "checkpoint_every": 10,
}
AT_A_GATE = "until [ -e gate ]; do sleep 0.02; done; "


def open_gate(stage: Stage) -> None:
    (stage.root / "gate").touch()


def receive_said(
    agent: Conversation, rank: int, kind: type[RankMessage], meant: Callable[..., bool]
) -> RankMessage:
    while True:
        said = agent.receive_of(RankSaid, rank)
        assert isinstance(said, RankSaid)
        if isinstance(said.message, kind) and meant(said.message):
            return said.message


def receive_training(agent: Conversation, rank: int = 0, above: int = 0) -> Heartbeat:
    """Return a heartbeat with more steps than `above`."""
    beat = receive_said(agent, rank, Heartbeat, lambda beat: beat.progress.step > above)
    assert isinstance(beat, Heartbeat)
    return beat


def announced(
    round_number: int, *ranks: int, attempts: Sequence[int] | None = None
) -> AnnounceGroup:
    """Return the order to send a group of these ranks."""
    members = tuple(
        GroupMember(worker_id=rank, rank=rank, host=LOCAL_HOST, port=0) for rank in ranks
    )
    group = WorkerGroup(round=round_number, token="", members=members, paused=False)
    return AnnounceGroup(group=group, attempts=tuple(attempts or [0] * len(ranks)))


def started(
    stage: Stage,
    agent: Conversation,
    command: list[str] | None,
    *,
    rank: int = 0,
    **names: object,
) -> AdoptedRank:
    agent.say(stage.order(command, rank=rank, **names))
    return adopted(stage.uid, agent.receive_of(RankSpawned, rank))


def taken_over(stage: Stage, *ranks: AdoptedRank, **names: object) -> Conversation:
    """Kill the agent and return what the next one says, from the beginning."""
    stage.kill_agent()
    stage.start_agent(adopted=ranks, **names)
    agent = stage.meet(epoch=2)
    assert isinstance(agent.receive(), AgentHello)
    return agent
