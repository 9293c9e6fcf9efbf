"""An agent dies, its ranks go on, and the next agent adopts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from muster.contracts.messages.agent import Dismiss, RankExited, TerminateRank
from muster.contracts.messages.rank import Heartbeat, Hello, JoinedGroup, Ready, Saved
from muster.contracts.settings.paths import TIME_MARK
from muster.host.containment import tag_of
from muster.host.processes import is_running, send_signal
from tests.support.agent_stage import AGENT_NUMBER, Stage, adopted
from tests.support.installation import await_value
from tests.support.takeovers import (
    AT_A_GATE,
    FOREVER,
    LONG,
    TOGETHER,
    announced,
    open_gate,
    receive_said,
    receive_training,
    started,
    taken_over,
)


def test_a_rank_trains_on_under_the_next_agent(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    before = receive_training(first)
    second = taken_over(stage, rank, is_managed=True)
    assert adopted(stage.uid, second.receive()) == rank
    assert is_running(rank.process)
    receive_said(second, 0, Hello, lambda _: True)
    receive_training(second, above=before.progress.step)
    second.say(TerminateRank(rank=0, attempt=0))
    receive_said(second, 0, Heartbeat, lambda beat: beat.stopping)
    assert second.receive_of(RankExited, 0).exit_code == 0
    record = stage.record(0, 0)
    assert (record.pid, record.exited.exit_code) == (rank.process.pid, 0)
    stopping = [
        said.message.stopping for said in record.said if isinstance(said.message, Heartbeat)
    ]
    assert stopping == [True]


def test_an_adopted_group_takes_a_new_round_and_a_new_rank(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    ranks = []
    for rank in (0, 1):
        ranks.append(started(stage, first, None, rank=rank, **TOGETHER))
        receive_said(first, rank, Ready, lambda _: True)
    first.say(announced(1, 0, 1))
    saved = receive_said(first, 0, Saved, lambda saved: saved.step > 0)

    second = taken_over(stage, *ranks, is_managed=True)
    second.say(announced(2, 0, 1))
    receive_said(second, 0, JoinedGroup, lambda joined: joined.round == 2)
    assert receive_said(second, 0, Saved, lambda s: s.generation == 2).step > saved.step
    second.say(stage.order(None, rank=2, **TOGETHER))
    receive_said(second, 2, Ready, lambda _: True)
    second.say(announced(3, 0, 1, 2))
    receive_said(second, 2, JoinedGroup, lambda joined: joined.round == 3)
    receive_training(second, 2, above=saved.step)
    assert all(is_running(rank.process) for rank in ranks)
    second.say(Dismiss())
    assert stage.exit_code() == 0
    assert not stage.running()


def test_saves_without_an_agent_are_reported_later(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **TOGETHER)
    receive_said(first, 0, Ready, lambda _: True)
    first.say(announced(1, 0))
    last = receive_said(first, 0, Saved, lambda saved: saved.step > 0).step
    stage.kill_agent()
    await_value(lambda: newest_step(stage) > last + 40, lambda: "it does not train on")
    second = taken_over(stage, rank, is_managed=True)
    told = [receive_said(second, 0, Saved, lambda _: True).step]
    while told[-1] <= last + 40:
        told.append(receive_said(second, 0, Saved, lambda _: True).step)
    assert told[told.index(last) :][:5] == [last + 10 * number for number in range(5)]


def newest_step(stage: Stage) -> int:
    lines = stage.files.log(0, 0).read_text().splitlines()
    steps = [line.split("step ")[1].split("/")[0] for line in lines if "step " in line]
    return int(steps[-1]) if steps else 0


def test_an_adopted_commands_exit_code_and_log_are_complete(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    script = f"echo before; {AT_A_GATE} echo after; exit 3"
    rank = started(stage, first, ["sh", "-c", script])
    stage.await_log("before")
    await_value(lambda: stage.files.times(0, 0).stat().st_size, lambda: "the index is empty")
    second = taken_over(stage, rank)
    open_gate(stage)
    exited = second.receive_of(RankExited, 0)
    assert (exited.exit_code, exited.signal) == (3, None)
    assert exited.last_lines == ("before", "after")
    assert stage.record(0, 0).exited.exit_code == 3
    notes = list(TIME_MARK.iter_unpack(stage.files.times(0, 0).read_bytes()))
    assert [size for size, _ in notes] == [len("before\n"), len("before\nafter\n")]


def test_what_an_adopted_rank_started_is_gone_at_its_exit(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    script = f"(setsid sleep 601 &); sleep 602 & echo ready; {AT_A_GATE} exit 0"
    rank = started(stage, first, ["sh", "-c", script])
    bystander = started(stage, first, list(FOREVER), rank=1)
    stage.await_log("ready")
    second = taken_over(stage, rank, bystander)
    open_gate(stage)
    assert second.receive_of(RankExited, 0).exit_code == 0
    assert not stage.running(rank=0)
    assert is_running(bystander.process)


def test_an_unseen_exit_is_reported_as_unknown(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    rank = started(stage, first, ["sh", "-c", "setsid sleep 601 & echo last words; sleep 600"])
    stage.await_log("last words")
    stage.kill_agent()
    send_signal(rank.process, signal.SIGKILL)
    await_value(lambda: not exists(rank.process.pid), lambda: "it is not reaped")
    second = taken_over(stage, rank)
    exited = second.receive_of(RankExited, 0)
    assert (exited.exit_code, exited.signal) == (None, None)
    assert exited.last_lines == ("last words",)
    assert (stage.record(0, 0).exited.exit_code, stage.record(0, 0).exited.signal) == (None, None)
    assert not stage.running(rank=0), "what it started is gone as well"


def test_a_rank_that_completes_under_a_stopped_agent_is_done(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, sleep_sec=0.01, epochs=2)
    receive_training(first)
    stage.signal_agent(signal.SIGSTOP)
    await_value(lambda: not is_running(rank.process), lambda: "it does not complete")
    stage.kill_agent()
    await_value(lambda: not exists(rank.process.pid), lambda: "it is not reaped")
    second = taken_over(stage, rank, is_managed=True)
    beat = receive_said(
        second, 0, Heartbeat, lambda beat: beat.progress.step == beat.progress.total_steps
    )
    assert not beat.stopping
    exited = second.receive_of(RankExited, 0)
    assert (exited.exit_code, exited.signal) == (0, None)
    assert stage.record(0, 0).exited == exited


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_recorded_exit_is_reported_by_the_next_agent(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    rank = started(stage, first, ["sh", "-c", "exit 4"])
    first.receive_of(RankExited, 0)
    written = stage.record(0, 0)
    second = taken_over(stage, rank)
    assert second.receive_of(RankExited, 0).exit_code == 4
    assert stage.record(0, 0) == written


def test_a_stopped_rank_is_not_taken_for_completed(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    receive_training(first)
    send_signal(rank.process, signal.SIGTERM)
    first.receive_of(RankExited, 0)
    second = taken_over(stage, rank, is_managed=True)
    receive_said(second, 0, Heartbeat, lambda beat: beat.stopping)
    assert second.receive_of(RankExited, 0).exit_code == 0


def test_an_unknown_rank_is_killed_before_another_starts(stage: Stage) -> None:
    stage.start_agent()
    first = stage.meet()
    # What a rank starts belongs to it even without the environment.
    leaving = ["sh", "-c", "setsid env -i sleep 603 & echo ready; sleep 600"]
    known = started(stage, first, leaving)
    unknown = started(stage, first, leaving, rank=1)
    for rank in (0, 1):
        stage.await_log("ready", rank)
        await_value(
            lambda rank=rank: len(stage.running(rank)) == 3, lambda: "it has started nothing"
        )
    before = stage.running(rank=0)
    second = taken_over(stage, known)
    assert not is_running(unknown.process)
    assert not stage.running(rank=1)
    assert stage.running(rank=0) == before
    again = started(stage, second, list(FOREVER), rank=1)
    # During exec there is a moment without a tag.
    await_value(lambda: stage.running(rank=1) == [again.process], lambda: "it does not run")


def test_a_prefork_server_ends_with_its_agent_only(stage: Stage) -> None:
    stage.start_agent(is_managed=True)
    first = stage.meet()
    rank = started(stage, first, None, **LONG)
    receive_said(first, 0, Hello, lambda _: True)
    stage.kill_agent()
    await_value(
        lambda: [tag_of(record.pid) for record in stage.running()] == [rank.process_tag],
        lambda: f"there are {[tag_of(record.pid) for record in stage.running()]}",
    )
    second = taken_over(stage, rank, is_managed=True)
    other = started(stage, second, None, rank=1, **LONG)
    receive_said(second, 1, Hello, lambda _: True)
    assert is_running(rank.process)
    assert is_running(other.process)


STRANGER = """
import os, socket, sys
caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
try:
    caller.connect(sys.argv[1])
    print(len(caller.recv(100)))
except OSError as error:
    print(type(error).__name__)
"""


def test_only_ranks_can_connect_to_the_agents_socket(stage: Stage) -> None:
    stage.start_agent()
    stage.meet().receive()
    await_value(stage.files.agent_socket(AGENT_NUMBER).exists, lambda: "there is no listener")
    for user_id in {os.geteuid(), 65534 if os.geteuid() == 0 else os.geteuid()}:
        words = [
            sys.executable,
            "-c",
            STRANGER,
            str(stage.files.agent_socket(AGENT_NUMBER)),
            str(user_id),
        ]
        answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        assert answer in {"0", "PermissionError"}
