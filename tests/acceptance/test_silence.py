"""A stopped agent does not fail its ranks; a program stopped before it joins is replaced."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from muster.contracts.rank import ProcessRecord
from muster.host.containment import tagged_processes
from muster.host.processes import counts_waits, send_signal
from tests.support.installation import Installation, await_value, is_running, pids, records

STEP_SECONDS = 0.05
TIMEOUT_SECONDS = 1
UNTIL_THE_GATE_OPENS = f"""
import pathlib, sys, time
import muster
run = muster.join()
while not pathlib.Path(sys.argv[1]).exists():
    run.step()
    print("stepped")
    time.sleep({STEP_SECONDS})
"""
ASLEEP_THE_FIRST_TIME = """
import os, time
if os.environ["MUSTER_GENERATION"] == "0":
    print("asleep")
    time.sleep(600)
"""


STARVED = """
import os, pathlib, sys, time
import muster
run = muster.join()
if run.rank == 0:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
print("joined", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    run.step()
    sum(range(10**7)) if run.rank == 0 else time.sleep(0.01)  # sum() keeps the GIL
"""
BUSY = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"


@contextmanager
def overload(processes: int) -> Iterator[None]:
    """Keep the first processor busy. Linux shares it by sessions: each process has its own."""
    with ExitStack() as busy:
        for _ in range(processes):
            command = [sys.executable, "-S", "-c", BUSY]
            process = busy.enter_context(subprocess.Popen(command, start_new_session=True))
            busy.callback(process.kill)
        yield


def agent_of(installation: Installation, job_id: str) -> ProcessRecord:
    (agent,) = tagged_processes(f"{installation.uids[job_id]}/agent")
    return agent


def begun(installation: Installation, gate: Path) -> str:
    """Submit two ranks that take steps until there is a gate; return their job."""
    job_id = installation.submit(
        world_size=2,
        command=[sys.executable, "-c", UNTIL_THE_GATE_OPENS, str(gate)],
        heartbeat_timeout=TIMEOUT_SECONDS,
    )
    installation.wait_until(job_id, lambda seen: all(w["step"] for w in seen["workers"]))
    return job_id


def await_steps(installation: Installation, job_id: str, seconds: float) -> None:
    """Wait until a rank has worked for so long, by its log: messages may not get through."""
    wanted = installation.log(job_id).count("stepped") + seconds / STEP_SECONDS
    await_value(
        lambda: installation.log(job_id).count("stepped") >= wanted,
        lambda: installation.describe(job_id),
    )


def test_ranks_of_a_stopped_agent_are_not_taken_for_silent(
    installation: Installation, tmp_path: Path
) -> None:
    job_id = begun(installation, tmp_path / "gate")
    before = pids(installation.see(job_id))
    agent = agent_of(installation, job_id)
    send_signal(agent, signal.SIGSTOP)
    await_steps(installation, job_id, 3 * TIMEOUT_SECONDS)
    send_signal(agent, signal.SIGCONT)
    await_steps(installation, job_id, 2 * TIMEOUT_SECONDS)
    assert pids(installation.see(job_id)) == before
    assert agent_of(installation, job_id) == agent
    (tmp_path / "gate").touch()
    assert installation.complete(job_id)["restarts"] == 0
    assert not {"agent_lost", "rank_killed"} & set(installation.kinds(job_id))


def test_frozen_agent_is_replaced_and_its_ranks_live_on(
    installation: Installation, tmp_path: Path
) -> None:
    job_id = begun(installation, tmp_path / "gate")
    before = records(installation.see(job_id))
    send_signal(agent_of(installation, job_id), signal.SIGSTOP)
    await_value(
        lambda: "agent_lost" in installation.kinds(job_id), lambda: installation.describe(job_id)
    )
    assert "agent_killed" in installation.kinds(job_id)
    (tmp_path / "gate").touch()
    assert installation.complete(job_id)["restarts"] == 0
    assert installation.kinds(job_id).count("rank_started") == len(before)
    assert "rank_killed" not in installation.kinds(job_id)


@pytest.mark.long
@pytest.mark.skipif(not counts_waits(), reason="the kernel counts no waits")
def test_a_starved_rank_is_kept_and_a_stopped_one_replaced(
    installation: Installation, tmp_path: Path
) -> None:
    job_id = installation.submit(
        world_size=2,
        command=[sys.executable, "-c", STARVED, str(tmp_path / "gate")],
        heartbeat_timeout=TIMEOUT_SECONDS,
    )
    for rank in (0, 1):
        await_value(lambda rank=rank: "joined" in installation.log(job_id, rank), str)
    with overload(30):
        await_value(
            lambda: "overloaded" in installation.kinds(job_id),
            lambda: installation.describe(job_id),
        )
        installation.kill(job_id, rank=1, number=signal.SIGSTOP)
        await_value(
            lambda: "rank_killed" in installation.kinds(job_id),
            lambda: installation.describe(job_id),
        )
    (tmp_path / "gate").touch()
    installation.complete(job_id)
    events = installation.events(job_id)
    killed = [event["rank"] for event in events if event["kind"] == "rank_killed"]
    assert killed == [1]
    assert [event["kind"] for event in events].count("overloaded") == 1


def test_program_stopped_before_it_joined_is_replaced(
    installation: Installation,
) -> None:
    job_id = installation.submit(
        world_size=1,
        command=[sys.executable, "-c", ASLEEP_THE_FIRST_TIME],
        heartbeat_timeout=TIMEOUT_SECONDS,
    )
    installation.wait_until(job_id, is_running)
    await_value(lambda: "asleep" in installation.log(job_id), lambda: "it does not start")
    installation.kill(job_id, rank=0, number=signal.SIGSTOP)
    seen = installation.complete(job_id)
    assert seen["endings"]["hang"] == 1
    told = [event["message"] for event in installation.events(job_id)]
    assert f"rank 0 was stopped (SIGSTOP) for {TIMEOUT_SECONDS} s and was killed" in told
