"""Ranks with GPUs of their own: who gets which, and when they are free again."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.cluster.vram import Lease
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankExited, RankSpawned
from muster.contracts.messages.assignment import VramNeed
from muster.contracts.messages.rank import PermanentFailure
from muster.contracts.rank import ProcessRecord
from muster.host.processes import environment_of, identify, send_signal
from tests.support.agent_stage import Conversation, Stage, adopted
from tests.support.gpus import install_gpus, show_use, write_nvidia_smi
from tests.support.takeovers import FOREVER, receive_said, started, taken_over
from worker.ranks.gpus import VramLedger


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which agents look for `nvidia-smi` first."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Stage]:
    """Another job on the same host."""
    root = tmp_path / "other"
    root.mkdir()
    stage = Stage(root)
    yield stage
    stage.close()


def gpus_of(process: ProcessRecord) -> set[str]:
    return set(environment_of(process.pid)["CUDA_VISIBLE_DEVICES"].split(","))


def begun(stage: Stage, per_rank: int, at_once: int | None = None) -> Conversation:
    """Start the agent of a job whose ranks have GPUs of their own."""
    stage.start_agent(gpus_per_rank=per_rank, gpus_at_once=at_once or per_rank)
    return stage.meet()


def waits(agent: Conversation, rank: int = 0) -> str:
    """Return what a rank lacked that could not start."""
    exited = agent.receive_of(RankExited, rank)
    assert isinstance(exited, RankExited)
    assert (exited.is_waiting, exited.exit_code, exited.signal) == (True, None, None)
    assert exited.unstarted is not None
    return exited.unstarted


def test_no_two_ranks_of_a_host_have_the_same_gpu(
    stage: Stage, other: Stage, nvidia_smi: Path
) -> None:
    uuids = install_gpus(nvidia_smi, 5)
    first, second = begun(stage, 2), begun(other, 1)
    env = {"CUDA_VISIBLE_DEVICES": ",".join(uuids[:4])}
    ranks = [
        started(stage, first, FOREVER, env=env),
        started(other, second, FOREVER, env=env),
        started(other, second, FOREVER, env=env, rank=1),
    ]
    held = [gpus_of(rank.process) for rank in ranks]
    assert [len(each) for each in held] == [2, 1, 1]
    assert set.union(*held) == set(uuids[:4]), "no GPU twice, and none that the job must not use"
    second.say(other.order(FOREVER, rank=2, env=env))
    assert waits(second, rank=2) == "found 0 of 1 free GPUs on its host"
    assert not other.files.log(2, 0).exists()


def test_a_killed_rank_frees_its_gpu_for_its_replacement(stage: Stage, nvidia_smi: Path) -> None:
    uuids = install_gpus(nvidia_smi, 1)
    agent = begun(stage, 1)
    for attempt in range(5):
        # What it has started holds the GPU too, until it is contained.
        agent.say(stage.order(["sh", "-c", "sleep 600 & sleep 600"], attempt=attempt))
        spawned = adopted(stage.uid, agent.receive_of(RankSpawned, 0))
        assert gpus_of(spawned.process) == set(uuids)
        send_signal(spawned.process, signal.SIGKILL)
        assert agent.receive_of(RankExited, 0).signal == signal.SIGKILL


def test_a_job_that_waits_starts_when_the_other_ends(
    stage: Stage, other: Stage, nvidia_smi: Path
) -> None:
    install_gpus(nvidia_smi, 2)
    first, second = begun(stage, 1), begun(other, 2)
    rank = started(stage, first, FOREVER)
    second.say(other.order(FOREVER))
    assert waits(second) == "found 1 of 2 free GPUs on its host"
    send_signal(rank.process, signal.SIGTERM)
    first.receive_of(RankExited, 0)
    started(other, second, FOREVER, attempt=1)


def test_a_rank_keeps_its_gpu_without_its_agent(
    stage: Stage, other: Stage, nvidia_smi: Path
) -> None:
    install_gpus(nvidia_smi, 1)
    first, second = begun(stage, 1), begun(other, 1)
    rank = started(stage, first, FOREVER)
    stage.kill_agent()
    second.say(other.order(FOREVER))
    waits(second)
    first = taken_over(stage, rank, gpus_per_rank=1, gpus_at_once=1)
    second.say(other.order(FOREVER, attempt=1))
    waits(second)
    send_signal(rank.process, signal.SIGKILL)
    first.receive_of(RankExited, 0)
    started(other, second, FOREVER, attempt=2)


def test_a_gang_takes_no_gpu_before_it_can_have_all(
    stage: Stage, other: Stage, nvidia_smi: Path
) -> None:
    uuids = install_gpus(nvidia_smi, 3)
    gang, single = begun(stage, 1, at_once=3), begun(other, 1)
    rank = started(other, single, FOREVER)
    gang.say(*(stage.order(FOREVER, rank=each) for each in range(3)))
    assert {waits(gang, each) for each in range(3)} == {"found 2 of 3 free GPUs on its host"}
    send_signal(rank.process, signal.SIGKILL)
    single.receive_of(RankExited, 0)
    ranks = [started(stage, gang, FOREVER, rank=each, attempt=1) for each in range(3)]
    assert set.union(*(gpus_of(each.process) for each in ranks)) == set(uuids)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (None, "its host has 0 for it, as there is no nvidia-smi on the PATH of the service"),
        ("echo no driver >&2; exit 9", "its host has 0 for it, as nvidia-smi failed (no driver)"),
        (
            "echo GPU-00000001",
            "the job needs 2 GPUs at once, and its host has 1 for it, CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_a_host_that_can_never_do_fails_the_job(
    stage: Stage, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, why: str
) -> None:
    if lines is None:
        monkeypatch.setenv("PATH", str(nvidia_smi))
    else:
        write_nvidia_smi(nvidia_smi, lines)
    agent = begun(stage, 2)
    agent.say(stage.order(FOREVER))
    refused = receive_said(agent, 0, PermanentFailure, lambda _: True)
    assert isinstance(refused, PermanentFailure)
    assert refused.reason is Reason.INVALID_PROGRAM
    assert why in refused.message
    assert agent.receive_of(RankExited, 0).exit_code == 126


def test_memory_is_reserved_until_its_rank_has_ended(
    stage: Stage, other: Stage, nvidia_smi: Path
) -> None:
    (gpu,) = install_gpus(nvidia_smi, 1)
    need = VramNeed(vram_mb=8000, wait_seconds=3600, usable_mb={gpu: 12_000})
    stage.start_agent(gpus_at_once=1, vram=need)
    other.start_agent(gpus_at_once=1, vram=need)
    first, second = stage.meet(), other.meet()
    rank = started(stage, first, FOREVER)
    assert gpus_of(rank.process) == {gpu}
    second.say(other.order(FOREVER))
    needed = f"waits for 8000 MB of GPU memory on {other.host}"
    assert waits(second) == f"{needed}: 4000 MB free on {gpu}; next try in 30 s"
    stage.kill_agent()
    show_use(nvidia_smi, [gpu], used=f"{rank.process.pid}, {gpu}, 9000\\n")
    second.say(other.order(FOREVER, attempt=1))
    assert waits(second) == f"{needed}: 3000 MB free on {gpu}; next try in 60 s"
    first = taken_over(stage, rank, gpus_at_once=1, vram=need)
    send_signal(rank.process, signal.SIGKILL)
    first.receive_of(RankExited, 0)
    show_use(nvidia_smi, [gpu])
    assert gpus_of(started(other, second, FOREVER, attempt=2).process) == {gpu}


def test_memory_of_an_agent_that_died_before_the_start_is_free(
    stage: Stage, nvidia_smi: Path, tmp_path: Path
) -> None:
    (gpu,) = install_gpus(nvidia_smi, 1)
    need = VramNeed(vram_mb=8000, wait_seconds=3600, usable_mb={gpu: 12_000})
    gone = subprocess.Popen(FOREVER)
    record = identify(gone.pid)
    assert record is not None
    how = {"process": record, "taken_at": time.time(), "renewed_at": time.time()}
    ledger = VramLedger(tmp_path / "muster/gpu-leases")
    with ledger.locked():
        ledger.write([Lease(tag="other/0/0", holder="rank 0", gpu=gpu, vram_mb=8000, **how)])
    stage.start_agent(gpus_at_once=1, vram=need)
    agent = stage.meet()
    agent.say(stage.order(FOREVER))
    waits(agent)
    gone.kill()
    gone.wait()
    rank = started(stage, agent, FOREVER, attempt=1)
    (lease,) = ledger.read()
    assert lease.process == rank.process
    assert lease.tag == rank.process_tag
