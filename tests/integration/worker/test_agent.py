"""A real agent, with a test as its coordinator over a real socket."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.checkpoints.manager import open_manager
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import (
    AgentHello,
    CheckpointsListed,
    Dismiss,
    InjectFault,
    KillRank,
    ListCheckpoints,
    RankExited,
    RankSaid,
    RankSpawned,
    TerminateRank,
    Welcome,
)
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.messages.rank import Executing, Hello, Orphaned, PermanentFailure
from muster.contracts.messages.wire import encode
from muster.contracts.settings.environ import process_tag
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.paths import rank_place
from muster.contracts.shards import Position
from muster.host.containment import tag_of
from muster.host.files import LOG_LIMIT_BYTES
from muster.host.processes import boot_id, identify, is_stopped, machine_id, send_signal
from muster.links.frames import frame
from tests.support.agent_stage import AGENT_NUMBER, Conversation, Stage
from tests.support.installation import await_value
from tests.support.storage_processes import session_of

FOREVER = ("sleep", "600")
SAVE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))
print('ready', flush=True)
signal.pause()
"""


def test_pulses_name_stopped_ranks_without_heartbeats(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    agent.say(stage.order(list(FOREVER)), stage.order(list(FOREVER), rank=1, attempt=3))
    sleeper = identify(agent.receive_of(RankSpawned, 1).pid)
    agent.receive_pulse()
    send_signal(sleeper, signal.SIGSTOP)
    agent.receive_pulse((1, 3))
    send_signal(sleeper, signal.SIGCONT)
    agent.receive_pulse()


def test_pulses_do_not_name_ranks_with_heartbeats(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    program = "import muster, time; run = muster.join(); time.sleep(600)"
    agent.say(stage.order([sys.executable, "-c", program]))
    sleeper = identify(agent.receive_of(RankSpawned, 0).pid)
    while not isinstance(agent.receive_of(RankSaid, 0).message, Hello):
        pass
    send_signal(sleeper, signal.SIGSTOP)
    await_value(lambda: is_stopped(sleeper.pid), lambda: "it is not stopped")
    agent.say(stage.order(list(FOREVER), rank=1))
    other = identify(agent.receive_of(RankSpawned, 1).pid)
    send_signal(other, signal.SIGSTOP)
    agent.receive_pulse((1, 0))


def test_a_fault_strikes_no_other_attempt(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    for rank in (0, 1):
        agent.say(stage.order(list(FOREVER), rank=rank, attempt=3))
        agent.receive_of(RankSpawned, rank)
    agent.say(InjectFault(signal=signal.SIGKILL, attempts=((0, 2), (1, 3)), agent=AGENT_NUMBER + 1))
    assert agent.receive_of(RankExited, 1).signal == signal.SIGKILL
    assert [it.pid for it in stage.running(0)], "its earlier attempt was meant"
    agent.receive_pulse()


def test_a_fault_of_a_host_ends_its_agent_and_ranks(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    for rank in (0, 1):
        agent.say(stage.order(list(FOREVER), rank=rank))
        agent.receive_of(RankSpawned, rank)
    agent.say(InjectFault(signal=signal.SIGKILL, attempts=((0, 0),), agent=AGENT_NUMBER))
    assert stage.exit_code() == -signal.SIGKILL
    await_value(lambda: not stage.running(), lambda: f"{stage.running()}")


def test_a_long_log_of_the_agent_is_rotated(stage: Stage) -> None:
    log = stage.files.agent_log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as writer:
        for number in range(2):
            writer.write(f"{number}\n".encode() * (LOG_LIMIT_BYTES // 2 + 1))
            if number == 0:
                stage.start_agent()
                stage.meet().say(stage.order(list(FOREVER)))
            await_value(lambda: log.stat().st_size == 0, lambda: "it is not rotated")
            writer.write(b"more\n")
    assert log.read_text() == "more\n"
    assert log.with_name("agent.log.1").read_text().startswith("more\n1\n1\n")


def test_an_attempt_whose_start_was_lost_is_reported_as_ended(stage: Stage) -> None:
    """The coordinator would wait for its exit for ever."""
    stage.start_agent()
    agent = stage.meet()
    agent.say(KillRank(rank=1, attempt=5))
    exited = agent.receive_of(RankExited, 1)
    assert (exited.attempt, exited.exit_code, exited.signal) == (5, None, signal.SIGKILL)
    agent.say(stage.order(["true"], rank=1, attempt=5))  # too late: that one has ended
    agent.say(stage.order(["true"], rank=0))
    agent.receive_of(RankExited, 0)
    assert not stage.files.log(1, 5).exists()


def test_agent_lists_what_each_rank_has_saved(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    saved = stage.root / "checkpoints"
    for rank, step in (0, 3), (0, 6), (1, 3):
        session = session_of(rank_place(saved, rank), 0, job_uid=stage.uid, keep_last=9)
        open_manager(session, print).save(step, Position(step=step), {})
    damaged = saved / "worker_1" / "step_0000000009.g0000"
    damaged.mkdir()
    agent.say(ListCheckpoints(attempt=1, location=str(saved), inherited=None, ranks=3))
    assert isinstance(agent.receive(), AgentHello)
    listed = agent.receive()
    assert isinstance(listed, CheckpointsListed)
    assert (listed.attempt, listed.inherited) == (1, ())
    assert [(len(it.intact), len(it.damaged)) for it in listed.own] == [(2, 0), (1, 1), (0, 0)]
    agent.say(ListCheckpoints(attempt=2, location=f"{damaged}\0", inherited=None, ranks=1))
    assert "null" in agent.receive().problem


STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
connection.sendall(bytes.fromhex(sys.argv[1]))
while connection.recv(65536): pass
print("hung up", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
@pytest.mark.parametrize("politely", [True, False])
def test_another_users_process_on_the_port_is_not_obeyed(stage: Stage, *, politely: bool) -> None:
    words = [Welcome(epoch=99)] * politely + [stage.order(FOREVER)]
    content = b"".join(frame(encode(word)) for word in words)
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, content.hex()], stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        stage.announce(CoordinatorAddress(host="127.0.0.1", port=int(stranger.stdout.readline())))
        stage.start_agent()
        assert stranger.stdout.readline() == "hung up\n"
    assert stage.running(rank=0) == []
    agent = stage.meet(epoch=1)  # the stranger's epoch was ignored too
    agent.say(stage.order(["true"]))
    assert agent.receive_of(RankExited, 0).exit_code == 0


def test_a_new_coordinator_gets_the_whole_state(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    first.say(stage.order(FOREVER, rank=0))
    spawned = first.receive_of(RankSpawned, 0)
    first.receive_of(RankSaid, 0)
    first.say(stage.order(["false"], rank=1))
    exited = first.receive_of(RankExited, 1)
    first.close()
    second = stage.meet(epoch=2)
    assert second.receive() == AgentHello(
        job_uid=stage.uid,
        host="local",
        agent_number=AGENT_NUMBER,
        token="a token",  # noqa: S106
        machine=machine_id(),
        boot_id=boot_id(),
        node=platform.node(),
        address="127.0.0.1",
    )
    assert second.receive() == spawned
    assert second.receive() == RankSaid(rank=0, attempt=0, message=Executing())
    assert second.receive() == RankSaid(rank=1, attempt=0, message=Executing())
    assert second.receive() == exited
    second.say(TerminateRank(rank=0, attempt=0))
    assert second.receive_of(RankExited, 0).signal == signal.SIGTERM


def test_an_exit_without_a_coordinator_is_reported_later(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    first.say(stage.order(["sh", "-c", "read line <gate; exit 4"]))
    os.mkfifo(stage.root / "gate")
    first.receive_of(RankSpawned, 0)
    stage.meet_nobody()
    first.close()
    (stage.root / "gate").write_text("go\n")
    await_value(stage.files.exit_record(0, 0).exists, lambda: "no exit was recorded")
    assert stage.meet(epoch=2).receive_of(RankExited, 0).exit_code == 4


def test_a_replaced_coordinator_is_not_obeyed(stage: Stage) -> None:
    stage.start_agent()
    present = stage.meet(epoch=5)
    present.say(stage.order(FOREVER))
    pid = present.receive_of(RankSpawned, 0).pid
    present.close()
    past = stage.meet(4, KillRank(rank=0, attempt=0), stage.order(["touch", "it"], rank=1))
    while past.receive():
        pass  # it sends its state until it has read the epoch
    assert [record.pid for record in stage.running(rank=0)] == [pid]
    later = stage.meet(6, stage.order(["true"], rank=2))
    later.receive_of(RankExited, 2)
    assert not (stage.root / "it").exists()


def test_an_orphaned_agent_lets_its_ranks_save(stage: Stage) -> None:
    stage.start_agent(orphan_timeout_seconds=0.3)
    agent = stage.meet()
    agent.say(stage.order([sys.executable, "-c", SAVE]))
    stage.await_log("ready")
    stage.meet_nobody()
    agent.close()
    assert stage.exit_code() == 0
    assert "saved" in stage.files.log(0, 0).read_text()
    record = stage.record(0, 0)
    assert record.exited.exit_code == 1
    assert Orphaned(by="its agent (no coordinator for 0.3 s)") in [s.message for s in record.said]


def test_an_orphaned_agent_kills_ranks_after_the_grace_period(stage: Stage) -> None:
    stage.start_agent(orphan_timeout_seconds=0.3)
    agent = stage.meet()
    agent.say(stage.order(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 600; done"]))
    stage.await_log("ready")
    stage.meet_nobody()
    agent.close()
    assert stage.exit_code() == 0
    assert stage.record(0, 0).exited.signal == signal.SIGKILL
    assert not stage.running()


def test_an_agent_without_any_coordinator_exits(stage: Stage) -> None:
    stage.start_agent(orphan_timeout_seconds=0.3)
    assert stage.exit_code() == 0


def test_a_process_that_left_environment_and_session_is_killed(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    shedding = "env -i setsid sh -c 'echo $$ >shed; exec sleep 600' &"
    script = f"{shedding} until [ -s shed ]; do sleep 0.01; done"
    agent.say(stage.order(["sh", "-c", script]))
    agent.receive_of(RankExited, 0)
    assert identify(int((stage.root / "shed").read_text())) is None


def test_ranks_of_managed_training_are_forked(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    agent = stage.meet()
    for rank in (0, 3):
        agent.say(stage.order(None, rank=rank))
        assert agent.receive_of(RankExited, rank).exit_code == 0
        assert stage.record(rank, 0).exited.exit_code == 0
        assert "step 1/1  is done" in stage.files.log(rank, 0).read_text()
    agent.say(Dismiss())
    assert stage.exit_code() == 0
    assert not stage.running()


def test_a_forked_rank_can_be_killed_at_once(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    agent = stage.meet()
    for attempt in range(20):
        start = stage.order(None, attempt=attempt, sleep_sec=60)  # it must not end first
        agent.say(start, KillRank(rank=0, attempt=attempt))
        assert agent.receive_of(RankExited, 0).signal == signal.SIGKILL
    agent.say(Dismiss())
    assert stage.exit_code() == 0


def test_a_killed_prefork_server_is_replaced_by_exec(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    agent = stage.meet()
    (prefork,) = await_value(
        lambda: [r for r in stage.running() if "prefork" in (tag_of(r.pid) or "")], str
    )
    # It may have forked a rank without having answered.
    half = subprocess.Popen(FOREVER, env={PROCESS_TAG: process_tag(stage.uid, 0, 0)})
    send_signal(prefork, signal.SIGKILL)
    agent.say(stage.order(None))
    assert agent.receive_of(RankExited, 0).exit_code == 0
    assert half.wait(60) == -signal.SIGKILL


def test_a_command_that_does_not_exist_is_refused(stage: Stage) -> None:
    stage.start_agent()
    agent = stage.meet()
    agent.say(stage.order(["no-such-program"]))
    refused = next_refusal(agent)
    assert refused.reason is Reason.INVALID_PROGRAM
    assert "'no-such-program' cannot be run: No such file or directory" in refused.message
    assert agent.receive_of(RankExited, 0).exit_code == 127


def test_a_prefork_server_refuses_a_missing_directory(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    agent = stage.meet()
    agent.say(replace(stage.order(None), working_dir=str(stage.root / "nowhere")))
    assert "nowhere" in next_refusal(agent).message
    assert agent.receive_of(RankExited, 0).exit_code == 126


def next_refusal(agent: Conversation) -> PermanentFailure:
    while True:
        said = agent.receive_of(RankSaid, 0)
        assert isinstance(said, RankSaid)
        if isinstance(said.message, PermanentFailure):
            return said.message


def test_exits_that_cannot_be_recorded_are_reported(stage: Stage) -> None:
    """The disk of its log and of its records is full, and its socket's place is occupied."""
    (stage.files.agent_socket(AGENT_NUMBER) / "is a directory").mkdir(parents=True)
    stage.files.exits.touch()
    with Path("/dev/full").open("wb") as full:
        stage.start_agent(log=full.fileno())
    agent = stage.meet()
    for rank, code in enumerate((0, 64)):
        agent.say(stage.order(["sh", "-c", f"exit {code}"], rank=rank))
        assert agent.receive_of(RankExited, rank).exit_code == code
    later = stage.meet(2)  # gets them from memory
    later.receive_of(RankExited, 0)
    later.say(Dismiss())
    assert stage.exit_code() == 0
