"""Jobs with restart_scope gang: all ranks restart when one dies, at a new port."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from muster.host.ports import free_port
from muster.host.processes import send_signal
from tests.support.installation import DEADLINE_SECONDS, Installation, Seen, is_running, pids

SCRIPT = Path(__file__).parents[2] / "examples" / "gang.py"
RANKS = 3
SUM = sum(step * (rank + 1) for step in range(1, 101) for rank in range(RANKS))

STUBBORN = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
port, before = os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {os.environ['RANK']} of 3 at port {port} goes on", flush=True)
while before == "0" or not Path("go").exists():
    time.sleep(0.02)
"""

SLOW = """
import os, signal, socket, sys, time, traceback
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "1":
    peer = socket.create_server(address).accept()[0]
    try:
        raise ValueError("a bad batch")
    except ValueError:
        traceback.print_exc()
    peer.close()
    signal.pause()
while True:
    try:
        peer = socket.create_connection(address)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
peer.recv(1)
raise ConnectionError("Connection closed by peer")
"""


SAVING = """
import muster, os, signal, time
from pathlib import Path
run, before = muster.join(), os.environ["TORCHELASTIC_RESTART_COUNT"]
if before == "1":
    raise SystemExit(not Path("saved").exists())
if run.rank > 0:
    while not Path("ready").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
Path("ready").touch()
while not run.should_stop:
    time.sleep(0.01)
for part in range(10):
    print("saves part", part, flush=True)
    time.sleep(0.1)
Path("saved").touch()
"""


def submit_gang(installation: Installation, script: Path = SCRIPT, **fields: object) -> str:
    command = [sys.executable, str(script), "0.02"]
    return installation.submit(
        **{"world_size": RANKS, "restart_scope": "gang", "command": command, **fields}
    )


def ports(installation: Installation, job_id: str) -> list[list[int]]:
    """Return where each rank has met the others, one port for each time."""
    return [
        [int(port) for port in re.findall(r"at port (\d+)", installation.log(job_id, rank))]
        for rank in range(RANKS)
    ]


def begins(installation: Installation, job_id: str) -> Seen:
    """Wait until all ranks have met."""
    return installation.wait_until(
        job_id, lambda seen: is_running(seen) and all(ports(installation, job_id))
    )


def restarts_of(seen: Seen) -> list[int]:
    return [worker["restarts"] for worker in seen["workers"]]


def test_a_gang_that_loses_a_rank_restarts_at_another_port(installation: Installation) -> None:
    job_id = submit_gang(installation)
    saved = installation.checkpoint_dir / f"gang-{job_id}.json"
    installation.wait_until(job_id, lambda seen: is_running(seen) and saved.exists())
    installation.kill(job_id, 0)
    seen = installation.complete(job_id)
    assert restarts_of(seen) == [1, 0, 0]
    first, *others = ports(installation, job_id)
    assert len(set(first)) == len(first) == 2
    assert others == [first, first]
    assert all(f"has the sum {SUM}" in installation.log(job_id, rank) for rank in range(RANKS))
    begun = re.findall(r"goes on from step (\d+)", installation.log(job_id))
    assert int(begun[-1]) >= 5


def test_the_example_needs_no_directory_that_hosts_share(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "gang-alone.json").write_text("[98, 7]")
    variables = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "0"],
            env={**variables, "RANK": str(rank), "CHECKPOINT_DIR": str(tmp_path / str(rank))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=DEADLINE_SECONDS)
        begun, total = re.findall(r"(?:from step|the sum) (\d+)", output)
        assert (begun, total) == ("98", str(7 + 3 * (99 + 100)))


def test_a_failed_gang_names_the_rank_that_failed_first(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    job_id = submit_gang(installation, script, world_size=2, max_restarts=0)
    installation.fail(job_id)
    message = installation.job(job_id)["message"]
    assert message.startswith("rank 1 failed first and may not be restarted")
    assert message.endswith("ValueError: a bad batch")


def test_the_others_of_a_gang_save_behind_a_pipe(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    run = f"{sys.executable} saving.py"
    words = f'[ $RANK != 0 ] || exec sh -c "{run} | tee copy"; exec {run}'
    job_id = submit_gang(
        installation, world_size=2, command=["sh", "-c", words], working_dir=str(tmp_path)
    )
    installation.complete(job_id)
    assert (tmp_path / "saved").exists()


def test_killed_coordinator_leaves_no_half_restarted_gang(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    job_id = submit_gang(
        installation, script, working_dir=str(tmp_path), stop_grace_seconds=2, max_fruitless=100
    )
    begins(installation, job_id)
    installation.kill(job_id, 1)
    installation.wait_until(job_id, lambda seen: seen["status"] == "RECOVERING")
    installation.restart_coordinator()
    installation.wait_until(
        job_id, lambda seen: is_running(seen) and all(pids(seen)) and restarts_of(seen)[1]
    )
    (tmp_path / "go").touch()
    seen = installation.complete(job_id)
    assert restarts_of(seen) == [0, 1, 0]
    first, *others = ports(installation, job_id)
    assert others == [first, first]
    assert len(set(first)) == len(first) == 2


def test_an_agent_that_dies_costs_a_gang_nothing(installation: Installation) -> None:
    job_id = submit_gang(installation)
    before = pids(begins(installation, job_id))
    (agent,) = (
        record
        for record, tag in installation.tagged()
        if tag.endswith("/agent") and tag.startswith(installation.uids[job_id])
    )
    send_signal(agent, signal.SIGKILL)
    seen = installation.wait_until(job_id, lambda _: "agent_adopted" in installation.kinds(job_id))
    assert pids(seen) == before
    assert installation.complete(job_id)["restarts"] == 0


def test_a_gang_is_stopped_in_the_middle_of_its_restart(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    job_id = submit_gang(installation, script, working_dir=str(tmp_path), stop_grace_seconds=600)
    begins(installation, job_id)
    installation.kill(job_id, 2)
    installation.wait_until(job_id, lambda seen: seen["status"] == "RECOVERING")
    installation.stop(job_id, grace_seconds=0.1)
    installation.wait_until(job_id, lambda seen: seen["status"] == "STOPPED")
    assert [len(met) for met in ports(installation, job_id)] == [1, 1, 1]
