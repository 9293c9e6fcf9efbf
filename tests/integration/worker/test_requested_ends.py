"""A requested end: whatever lies between the agent and the trainer, its last save is whole."""

import os
import signal
import sys
from importlib.util import find_spec

import pytest

from muster.contracts.messages.agent import KillRank, RankExited, RankSpawned, TerminateRank
from muster.contracts.messages.assignment import AdoptedRank
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import process_tag
from muster.host.processes import identify
from tests.support.agent_stage import Conversation, Stage
from tests.support.installation import await_value
from tests.support.marks import long

TRAINER = """
import muster, signal, sys, time
from pathlib import Path

run = muster.join()
told = signal.getsignal(signal.SIGTERM)
def count(*signalled):
    with Path("calls").open("a") as calls:
        calls.write("called\\n")
    told(*signalled)
signal.signal(signal.SIGTERM, count)
Path("ready").touch()
while not run.should_stop:
    time.sleep(0.01)
for part in range(15):
    print("saving", part, flush=True)
    time.sleep(0.1)
Path("saved").touch()
"""

LOADING = """
import muster, time
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

if __name__ == "__main__":
    run = muster.join()
    batches = iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context="{method}"))
    next(batches)
    Path("ready").touch()
    while not run.should_stop:
        next(batches)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        next(batches)
    Path("saved").touch()
"""

PYTHON = f"{sys.executable} trainer.py"
IN_PYTHON = f"import subprocess; subprocess.run({PYTHON.split()!r}, close_fds=%s)"
WRAPPERS = {
    "none": PYTHON.split(),
    "bash script": ["bash", "-c", f"{PYTHON}\nexit"],
    "cd": ["sh", "-c", f"cd . && {PYTHON} && true"],
    "tee": ["sh", "-c", f"{PYTHON} | tee copy"],
    "setsid": ["sh", "-c", f"setsid {PYTHON}; true"],
    "forwards": ["sh", "-c", f"timeout 600 {PYTHON}; true"],
    "trap": ["bash", "-c", f"trap 'kill $!; wait' TERM; {PYTHON} & wait; wait"],
    "python": [sys.executable, "-c", IN_PYTHON % False],
    "python without the channel": [sys.executable, "-c", IN_PYTHON % True],
}


@pytest.fixture
def agent(stage: Stage) -> Conversation:
    (stage.root / "trainer.py").write_text(TRAINER)
    stage.start_agent(stop_grace_seconds=30)
    return stage.meet()


def begin(stage: Stage, agent: Conversation, command: list[str]) -> ProcessRecord:
    """Start a rank, wait until it trains, and return the rank's own process."""
    agent.say(stage.order(command))
    spawned = agent.receive_of(RankSpawned, 0)
    ready = stage.root / "ready"
    log = stage.files.log(0, 0)
    await_value(ready.exists, lambda: log.read_text() if log.exists() else "no log", 60)
    record = identify(spawned.pid)
    assert record is not None
    return record


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_trainer_under_a_wrapper_saves_once(
    stage: Stage, agent: Conversation, wrapper: str
) -> None:
    begin(stage, agent, WRAPPERS[wrapper])
    agent.say(TerminateRank(rank=0, attempt=0), TerminateRank(rank=0, attempt=0))
    exited = agent.receive_of(RankExited, 0)
    assert (stage.root / "saved").exists(), stage.files.log(0, 0).read_text()
    assert (stage.root / "calls").read_text() == "called\n"
    if wrapper != "python without the channel":  # the trainer's last word, not its wrapper's
        assert (exited.exit_code, exited.signal) == (0, None)
    assert not stage.running(0)


@pytest.mark.parametrize("method", ["fork", "spawn", long("forkserver")])
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.slow  # four imports of torch
def test_a_trainer_saves_with_its_workers(stage: Stage, agent: Conversation, method: str) -> None:
    (stage.root / "trainer.py").write_text(LOADING.format(method=method))
    begin(stage, agent, PYTHON.split())
    agent.say(TerminateRank(rank=0, attempt=0))
    exited = agent.receive_of(RankExited, 0)
    assert (stage.root / "saved").exists(), stage.files.log(0, 0).read_text()
    assert exited.exit_code == 0
    assert not stage.running(0)


def test_a_trainer_saves_before_its_agent_leaves(stage: Stage, agent: Conversation) -> None:
    begin(stage, agent, WRAPPERS["tee"])
    stage.signal_agent(signal.SIGTERM)
    agent.receive_of(RankExited, 0)
    assert (stage.root / "saved").exists()
    assert stage.exit_code() == 0


def test_a_trainer_saves_after_its_agent_was_replaced(stage: Stage, agent: Conversation) -> None:
    """The next agent learns first who said hello, and does not ask again who stops already."""
    process = begin(stage, agent, WRAPPERS["tee"])
    stage.kill_agent()
    agent.close()
    adopted = AdoptedRank(
        rank=0, attempt=0, process=process, process_tag=process_tag(stage.uid, 0, 0)
    )
    order = TerminateRank(rank=0, attempt=0)
    stage.start_agent(adopted=[adopted])
    stage.meet(2, order)
    calls = stage.root / "calls"
    await_value(calls.exists, lambda: "it was not asked")
    stage.kill_agent()
    stage.start_agent(adopted=[adopted])
    exited = stage.meet(3, order).receive_of(RankExited, 0)
    assert (stage.root / "saved").exists()
    assert calls.read_text() == "called\n"
    assert exited.attempt == 0


def test_a_service_does_not_prolong_a_requested_end(stage: Stage, agent: Conversation) -> None:
    daemon = "setsid sh -c 'trap \"\" TERM; while :; do sleep 600; done' & "
    begin(stage, agent, ["sh", "-c", f"{daemon} {PYTHON}; true"])
    agent.say(TerminateRank(rank=0, attempt=0))
    assert agent.receive_of(RankExited, 0).exit_code == 0
    assert (stage.root / "saved").exists()
    assert not stage.running(0)


def test_a_program_in_the_group_has_until_its_kill(stage: Stage, agent: Conversation) -> None:
    """Without a hello it is not known who saves: the shell that dies at once is not the rank."""
    deaf = "trap '' TERM; touch ready; while :; do sleep 600; done"
    shell = begin(stage, agent, ["sh", "-c", f"sh -c '{deaf.replace(chr(39), chr(34))}'; true"])
    agent.say(TerminateRank(rank=0, attempt=0))
    await_value(lambda: identify(shell.pid) is None, lambda: "the shell lives")
    agent.say(stage.order(["true"], rank=1))
    agent.receive_of(RankExited, 1)
    assert stage.running(0)
    agent.say(KillRank(rank=0, attempt=0))
    assert agent.receive_of(RankExited, 0).signal == signal.SIGTERM
    assert not stage.running(0)


def test_an_end_without_a_request_is_contained_at_once(stage: Stage, agent: Conversation) -> None:
    shell = begin(stage, agent, ["sh", "-c", f"{PYTHON}; true"])
    os.kill(shell.pid, signal.SIGTERM)
    assert agent.receive_of(RankExited, 0).signal == signal.SIGTERM
    assert not (stage.root / "saved").exists()
    assert not stage.running(0)
