"""Jobs whose agents a real Slurm starts, on nodes that are test hosts."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import (
    ENDLESS,
    SIX_RANKS,
    ClusterInstallation,
    lent_cluster,
    needs_cluster,
    scheduler_cluster,
    trains,
)
from tests.support.installation import await_value, is_running
from tests.support.slurm import Slurm, needs_slurm

pytestmark = [needs_slurm(), needs_cluster(), pytest.mark.timeout(300)]

JOB = {**SIX_RANKS, **Slurm.fields}
ENDLESS_JOB = {**ENDLESS, **Slurm.fields}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ClusterInstallation, Slurm]]:
    with scheduler_cluster(tmp_path_factory.mktemp("slurm"), Slurm) as both:
        yield both


@pytest.fixture
def installation(both: tuple[ClusterInstallation, Slurm]) -> Iterator[ClusterInstallation]:
    yield from lent_cluster(*both)


@pytest.fixture
def slurm(both: tuple[ClusterInstallation, Slurm]) -> Slurm:
    return both[1]


def muster(installation: ClusterInstallation, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli", *words],
        env={**installation.environment, "MUSTER_URL": installation.url},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_rank_is_replaced_where_it_was(installation: ClusterInstallation, slurm: Slurm) -> None:
    job_id = installation.submit(**ENDLESS_JOB)
    installation.wait_until(job_id, trains(10))
    names = slurm.jobs()
    ranks = [pid for pid, tag in installation.all_tags().items() if tag[:1].isdigit()]
    os.kill(ranks[0], signal.SIGKILL)
    installation.wait_until(job_id, lambda seen: is_running(seen) and seen["restarts"] == 1)
    assert slurm.jobs() == names


def test_an_agent_that_must_leave_saves_and_gets_another_job(
    installation: ClusterInstallation, slurm: Slurm
) -> None:
    job_id = installation.submit(**ENDLESS_JOB)
    seen = installation.wait_until(job_id, trains(10))
    name = next(name for name in slurm.jobs() if "slurm-2-a1" in name)
    slurm.run("scancel", "--batch", "--signal=USR1", slurm.id_of(name))
    await_value(
        lambda: any("slurm-2-a2" in name for name in slurm.jobs()),
        lambda: installation.describe(job_id),
    )
    installation.wait_until(job_id, trains(seen["step"] + 10))
    assert name not in slurm.jobs()


def test_nodes_that_do_not_share_the_directory_send_checkpoints(
    installation: ClusterInstallation, slurm: Slurm
) -> None:
    slurm.run("scontrol", "update", "NodeName=host-0", "State=DRAIN", "Reason=test")
    own = str(installation.machines[0].local / "checkpoints")
    job_id = installation.submit(**{**JOB, "checkpoint_dir": own, "world_size": 4})
    installation.complete(job_id)
    assert installation.kinds(job_id).count("checkpoints_sent") == 2
    installation.last_digest(job_id)
    slurm.run("scontrol", "update", "NodeName=host-0", "State=RESUME")


def test_a_gang_gets_the_variables_of_torchrun(installation: ClusterInstallation) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "SLURM_PROCID")
    words = f"import os; print(*(os.environ.get(name) for name in {names}))"
    job_id = installation.submit(
        command=[sys.executable, "-c", words],
        world_size=4,
        restart_scope="gang",
        engine="slurm",
        engine_options={"ranks_per_host": 2, "cpus_per_rank": 2},
    )
    installation.complete(job_id)
    answer = installation.request("GET", f"/jobs/{job_id}/logs").json()
    lines = sorted(line["line"].split() for line in answer["lines"])
    (address,) = {line[4] for line in lines}
    assert address.startswith("10.0.0.")
    assert [line[:4] for line in lines] == [
        ["0", "0", "2", "0"],
        ["1", "1", "2", "0"],
        ["2", "0", "2", "1"],
        ["3", "1", "2", "1"],
    ]
    assert {line[5] for line in lines} == {"None"}


def test_a_sweep_cancels_what_no_job_here_owns(
    installation: ClusterInstallation, slurm: Slurm
) -> None:
    installation.wait_until(installation.submit(**ENDLESS_JOB), trains(10))
    ours, left = slurm.jobs(), "muster-feed-slurm-1-a1"
    slurm.run("sbatch", "--hold", f"--job-name={left}", "--output=/dev/null", "--wrap=true")
    listed = muster(installation, "engines", "sweep", "-o", "name")
    assert (listed.returncode, listed.stdout) == (0, f"{left}\n"), listed.stderr
    assert slurm.jobs().keys() == {*ours, left}
    swept = muster(installation, "engines", "sweep", "slurm", "--yes")
    assert re.search(f"slurm +{left} +unknown +Slurm job [0-9]+: PENDING", swept.stdout), swept
    assert swept.returncode == 0
    assert swept.stderr.endswith("muster: cancelled: 1 job\n")
    assert slurm.jobs() == ours
    assert muster(installation, "engines", "sweep").stdout == "nothing is left on slurm\n"


def test_a_sweep_says_what_to_do_without_slurms_controller(
    installation: ClusterInstallation, slurm: Slurm
) -> None:
    assert slurm.controller is not None
    slurm.controller.send_signal(signal.SIGTERM)  # it saves its state
    slurm.controller.wait()
    try:
        swept = muster(installation, "engines", "sweep", "--yes")
    finally:
        slurm.start_controller()
    assert swept.returncode == 1, swept
    words = "slurm does not answer: sinfo.*: run (it|sinfo) on the coordinator's host"
    assert re.search(words, swept.stderr), swept
    await_value(slurm.is_up, lambda: "the controller is not back")


def test_a_rank_and_a_host_are_struck_where_they_are(
    installation: ClusterInstallation, slurm: Slurm
) -> None:
    job_id = installation.submit(**ENDLESS_JOB)
    installation.wait_until(job_id, trains(10))
    names = slurm.jobs()
    rank = muster(installation, "chaos", job_id, "--rank", "3")
    assert rank.returncode == 0, rank
    assert "rank 3 runs again, as pid " in rank.stdout
    assert "the replacement is ready" in rank.stdout
    assert slurm.jobs() == names
    host = muster(installation, "chaos", job_id, "--host", "slurm-3")
    assert host.returncode == 0, host
    assert [host.stdout.count(f"rank {it} runs again") for it in range(6)] == [0, 0, 0, 0, 1, 1]
    assert len(slurm.jobs().keys() & names.keys()) == 2


def test_a_killed_agent_loses_no_line(installation: ClusterInstallation) -> None:
    words = "import itertools, time\nfor n in itertools.count(): print(n); time.sleep(0.002)"
    job_id = installation.submit(
        command=[sys.executable, "-c", words],
        world_size=1,
        engine="slurm",
        max_log_bytes=1 << 20,
    )
    job_root = installation.machines[0].directory / "data" / "jobs" / job_id
    log = job_root / "logs" / "rank_00000.000.log"
    await_value(lambda: log.exists() and log.stat().st_size > 2000, lambda: "no lines")
    (agent,) = [pid for pid, tag in installation.all_tags().items() if tag == "agent"]
    root = Path(f"/proc/{agent}/root")  # of its host
    there = max(root.glob(f"tmp/muster-*/job/logs/{log.name}"), key=lambda it: it.stat().st_ctime)
    with there.open() as lines:
        os.kill(agent, signal.SIGKILL)
        later = job_root / "logs" / "rank_00000.001.log"
        await_value(later.exists, lambda: installation.describe(job_id))
        assert log.read_text() == lines.read()


def test_a_killed_parent_takes_its_agent_along(
    installation: ClusterInstallation, slurm: Slurm
) -> None:
    job_id = installation.submit(**ENDLESS_JOB)
    installation.wait_until(job_id, trains(10))
    (agent, *_) = [pid for pid, tag in installation.all_tags().items() if tag == "agent"]
    status = Path(f"/proc/{agent}/status").read_text()
    (parent,) = re.findall(r"^PPid:\t(\d+)$", status, re.MULTILINE)
    os.kill(int(parent), signal.SIGKILL)
    await_value(lambda: not Path(f"/proc/{agent}").exists(), lambda: f"{installation.all_tags()}")
    await_value(
        lambda: any(name.endswith("-a2") for name in slurm.jobs()),
        lambda: installation.describe(job_id),
    )
    step = installation.see(job_id)["step"]
    installation.wait_until(job_id, trains(step + 50))


def test_two_installations_leave_each_others_jobs_alone(
    installation: ClusterInstallation, slurm: Slurm, tmp_path: Path
) -> None:
    first, *_ = installation.machines
    settings = {"MUSTER_ENGINES": "slurm", "MUSTER_AGENT_ADDRESS": f"{first.address}:7401"}
    settings |= {"CHECKPOINT_DIR": str(first.shared / "others"), **slurm.environment}
    other = ClusterInstallation(tmp_path, installation.machines, **settings)
    other.environment["MUSTER_DATA_DIR"] = str(first.local / "other")
    other.api.environment["MUSTER_DATA_DIR"] = str(first.directory / "other")
    job = {**ENDLESS_JOB, "world_size": 2, "engine_options": {"ranks_per_host": 1}}
    with other:
        both = [(it, it.submit(**job)) for it in (installation, other)]
        seen = [it.wait_until(job_id, trains(10)) for it, job_id in both]
        names = slurm.jobs()
        assert len(names) == 4
        for (it, job_id), before in zip(both, seen, strict=True):
            it.restart_coordinator(signal.SIGKILL)
            it.wait_until(job_id, trains(before["step"] + 50))
        assert slurm.jobs() == names
        other.end_jobs()
        await_value(lambda: len(slurm.jobs()) == 2, lambda: f"{slurm.jobs()}")
        installation.restart_coordinator(signal.SIGKILL)
        step = installation.see(both[0][1])["step"]
        later = installation.wait_until(both[0][1], trains(step + 50))
    assert [it["restarts"] for it in later["workers"]] == [0] * 2
