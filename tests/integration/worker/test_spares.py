"""A spare process: it becomes the next attempt, and whatever happens to it, ranks start."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from muster.contracts.agent import LOCAL_HOST
from muster.contracts.messages.agent import (
    AnnounceGroup,
    Dismiss,
    RankExited,
    RankSaid,
    RankSpawned,
    StartRank,
)
from muster.contracts.messages.rank import (
    GroupMember,
    Heartbeat,
    JoinedGroup,
    Ready,
    Warned,
    WorkerGroup,
)
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import SPARE_RANK
from muster.host.containment import is_contained, tag_number_of, tag_numbers, tag_of
from muster.host.processes import identify, is_running, send_signal
from tests.support.agent_stage import Conversation, Stage
from tests.support.installation import await_value

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
from muster.program import Contribution

print("imported", flush=True)
if "MUSTER_SPARE" in os.environ:
    exec(Path("in_a_spare.py").read_text())

class Constant:
    def initial(self, seed):
        return {"w": np.zeros(4, np.float32)}
    def gradient(self, state, batch, random):
        return Contribution({"w": np.ones(4, np.float32)}, 0.0)
    def update(self, state, gradients, step):
        return {"w": state["w"] - gradients["w"]}
"""

BUSY_IMPORT = """
# An import that leaves a thread and an open file behind.
import threading
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
opened = open("opened", "w")
"""

POLL = "7 "
"""poll(2) in /proc/PID/syscall: a spare process waits for its order."""


@pytest.fixture
def agent(stage: Stage, request: pytest.FixtureRequest) -> Conversation:
    (stage.root / "program.py").write_text(PROGRAM)
    (stage.root / "in_a_spare.py").write_text("")
    stage.start_agent(is_managed=getattr(request, "param", True), spare_ranks=1)
    return stage.meet()


def order(stage: Stage, attempt: int, **spec: object) -> StartRank:
    return stage.order(
        None,
        attempt=attempt,
        **{"mode": "synchronous", "program": "program.py:Constant", "epochs": 100_000, **spec},
        sleep_sec=0.01,
    )


def start(stage: Stage, agent: Conversation, attempt: int, **spec: object) -> int:
    """Start rank 0, let it train alone, and return its pid."""
    group = WorkerGroup(
        round=attempt + 1,
        token="",
        members=(GroupMember(worker_id=attempt, rank=0, host=LOCAL_HOST, port=0),),
        paused=False,
    )
    announced = AnnounceGroup(group=group, attempts=(attempt,))
    agent.say(order(stage, attempt, **spec), announced)
    spawned = agent.receive_of(RankSpawned, 0)
    assert isinstance(spawned, RankSpawned)
    receive(agent, JoinedGroup)
    return spawned.pid


def receive(agent: Conversation, kind: type) -> object:
    while True:
        said = agent.receive_of(RankSaid, 0)
        assert isinstance(said, RankSaid)
        if isinstance(said.message, kind):
            return said.message


def last_step(agent: Conversation, after: int) -> int:
    """Wait until rank 0 has taken a step after this one."""
    while True:
        heartbeat = receive(agent, Heartbeat)
        assert isinstance(heartbeat, Heartbeat)
        if heartbeat.progress.step > after:
            return heartbeat.progress.step


def end(agent: Conversation, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    agent.receive_of(RankExited, 0)


def spares(stage: Stage) -> list[ProcessRecord]:
    numbers = tag_numbers(f"{stage.uid}/{SPARE_RANK}")
    found = stage.running(SPARE_RANK)
    return sorted((it for it in found if tag_number_of(it.pid) in numbers), key=lambda it: it.pid)


def await_spare(stage: Stage, *, is_ready: bool = True) -> ProcessRecord:
    def waits() -> ProcessRecord | None:
        found = spares(stage)[:1]
        calls = [Path(f"/proc/{spare.pid}/syscall").read_text() for spare in found]
        return found[0] if found and (calls[0].startswith(POLL) or not is_ready) else None

    return await_value(waits, lambda: f"no spare process: {spares(stage)}")


@pytest.mark.parametrize("agent", [True, False], ids=["fork", "exec"], indirect=True)
def test_a_spare_becomes_the_next_attempt(stage: Stage, agent: Conversation) -> None:
    daemon = "echo $$ > daemon; while sleep 0.1; do echo a daemon; done"
    command = ["sh", "-c", f"(setsid sh -c '{daemon}' &)"]
    (stage.root / "in_a_spare.py").write_text(f"subprocess.run({command!r})\n{BUSY_IMPORT}")
    first = start(stage, agent, 0)
    spare = await_spare(stage)
    helper = int(await_value((stage.root / "daemon").read_text, lambda: "no daemon"))
    end(agent, first)
    assert start(stage, agent, 1) == spare.pid
    assert tag_of(spare.pid) == f"{stage.uid}/0/1"
    for pid in (spare.pid, helper):  # what the program has started at its import belongs to it
        assert is_contained(pid, f"{stage.uid}/0/1")
    assert os.sched_getscheduler(spare.pid) == os.SCHED_OTHER
    log = stage.files.log(0, 1)
    assert log.read_text().startswith("imported\n")
    await_value(lambda: "a daemon" in log.read_text().partition("step ")[2], log.read_text)
    assert await_spare(stage).pid not in (spare.pid, helper)
    end(agent, spare.pid)
    await_value(lambda: not Path(f"/proc/{helper}").exists(), lambda: "its helper lives")
    agent.say(Dismiss())
    assert stage.exit_code() == 0
    assert not stage.running()


@pytest.mark.parametrize(
    ("in_a_spare", "is_with_its_rank"),
    [("time.sleep(100)", False), ("", False), ("", True)],
    ids=["killed while it loads", "killed while it waits", "killed with its rank"],
)
def test_a_killed_spare_is_replaced_by_a_fork(
    stage: Stage, agent: Conversation, *, in_a_spare: str, is_with_its_rank: bool
) -> None:
    (stage.root / "in_a_spare.py").write_text(in_a_spare)
    first = start(stage, agent, 0)
    spare = await_spare(stage, is_ready=not in_a_spare)
    if is_with_its_rank:
        os.kill(first, signal.SIGKILL)
    send_signal(spare, signal.SIGKILL)
    # Until then it could become the rank, and end as one.
    await_value(lambda: not is_running(spare), lambda: "it lives")
    if not is_with_its_rank:
        os.kill(first, signal.SIGKILL)
    agent.receive_of(RankExited, 0)
    assert start(stage, agent, 1) != spare.pid
    (stage.root / "in_a_spare.py").write_text("")
    assert await_spare(stage) != spare  # after a pause


def test_training_goes_on_while_spares_are_killed(stage: Stage, agent: Conversation) -> None:
    pid = start(stage, agent, 0)
    steps = [last_step(agent, after=0)]
    for _ in range(2):
        spare = await_spare(stage)
        send_signal(spare, signal.SIGKILL)
        await_value(lambda spare=spare: not is_running(spare), lambda: "it lives")
        steps.append(last_step(agent, after=steps[-1]))
    await_spare(stage)
    assert [it.pid for it in stage.running(0)] == [pid]


def test_a_program_that_fails_only_in_a_spare_is_reported_once(
    stage: Stage, agent: Conversation
) -> None:
    (stage.root / "in_a_spare.py").write_text("os.environ['RANK']")
    pid = start(stage, agent, 0)
    warned = receive(agent, Warned)
    assert isinstance(warned, Warned)
    assert "KeyError: 'RANK'" in warned.message
    end(agent, pid)
    start(stage, agent, 1)
    agent.say(Dismiss())
    assert stage.exit_code() == 0
    assert not spares(stage)


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup with 256 MB, version 1 or 2."""
    cgroups = Path("/sys/fs/cgroup")
    parent = cgroups / "memory" if (cgroups / "memory").is_dir() else cgroups
    limit = "memory.max" if parent == cgroups else "memory.limit_in_bytes"
    group = parent / f"muster-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(256 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can be made: {error}")
    yield group

    def is_gone() -> bool:
        with suppress(OSError):  # something in it has not ended yet
            group.rmdir()
        return not group.exists()

    await_value(is_gone, (group / "cgroup.procs").read_text)


def test_a_spare_without_enough_memory_is_the_last(stage: Stage, memory_cgroup: Path) -> None:
    (stage.root / "program.py").write_text(PROGRAM)
    (stage.root / "in_a_spare.py").write_text("filled = b'x' * (1 << 30)")
    joins = f"open({str(memory_cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    runs = "runpy.run_module('worker.agent', run_name='__main__')"
    program = ("-c", f"import os, runpy; {joins}; {runs}")
    stage.start_agent(is_managed=True, spare_ranks=1, program=program)
    agent = stage.meet()
    first = start(stage, agent, 0)
    warned = receive(agent, Warned)
    assert isinstance(warned, Warned)
    assert warned.message == (
        "spare processes are off (there is too little memory): "
        "new ranks load the program when they start"
    )
    assert last_step(agent, after=0)
    end(agent, first)
    start(stage, agent, 1)
    agent.say(Dismiss())
    assert stage.exit_code() == 0
    assert not spares(stage)


def test_a_spare_with_other_variables_is_not_used(stage: Stage, agent: Conversation) -> None:
    first = start(stage, agent, 0)
    spare = await_spare(stage)
    end(agent, first)
    assert start(stage, agent, 1, keep_last=2) != spare.pid
    await_value(lambda: not is_running(spare), lambda: "it lives")


def test_a_spare_ends_with_its_agent(stage: Stage, agent: Conversation) -> None:
    start(stage, agent, 0)
    spare = await_spare(stage)
    stage.kill_agent()
    await_value(lambda: not is_running(spare), lambda: "it lives")


LOADS = """
subprocess.run(["sh", "-c", "(setsid sh -c 'echo $$ > helper; sleep 100' &)"])
while not Path("go").exists():
    time.sleep(0.01)
"""


def start_loading_spare(stage: Stage, agent: Conversation) -> ProcessRecord:
    """Let one spare process become rank 0, and return the next one, which is still loading."""
    first = start(stage, agent, 0)
    await_spare(stage)
    (stage.root / "in_a_spare.py").write_text(LOADS)
    end(agent, first)
    second = start(stage, agent, 1)
    spare = await_spare(stage, is_ready=False)
    end(agent, second)
    return spare


def test_a_spare_that_still_loads_becomes_the_next_attempt(
    stage: Stage, agent: Conversation
) -> None:
    spare = start_loading_spare(stage, agent)
    agent.say(order(stage, 2))
    spawned = agent.receive_of(RankSpawned, 0)
    assert isinstance(spawned, RankSpawned)
    assert spawned.pid == spare.pid
    (stage.root / "go").touch()
    assert receive(agent, Ready) == Ready(port=0), "not that of a spare process"
    assert tag_of(spare.pid) == f"{stage.uid}/0/2"


def test_the_first_spare_ends_if_it_still_loads_when_a_rank_starts(
    stage: Stage, agent: Conversation
) -> None:
    (stage.root / "in_a_spare.py").write_text("time.sleep(100)")
    first = start(stage, agent, 0)
    spare = await_spare(stage, is_ready=False)
    end(agent, first)
    assert start(stage, agent, 1) != spare.pid
    assert not is_running(spare)


def test_what_a_loading_spare_has_started_ends_with_it(stage: Stage, agent: Conversation) -> None:
    spare = start_loading_spare(stage, agent)
    file = stage.root / "helper"
    pid = int(await_value(lambda: file.exists() and file.read_text(), lambda: "no helper"))
    assert (helper := identify(pid)) is not None
    agent.say(order(stage, 2))
    agent.receive_of(RankSpawned, 0)
    end(agent, spare.pid)
    assert not is_running(helper)
