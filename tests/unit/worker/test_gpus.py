"""Memory of GPUs: who gets a lease, how long a rank waits, and what is left when a process dies."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.cluster.vram import Lease
from muster.contracts.messages.assignment import AgentAssignment, VramNeed
from muster.contracts.rank import ProcessRecord
from muster.host.gpus import GpusBusy
from muster.host.processes import boot_id, this_process
from muster.program import InvalidProgram
from tests.support.agent_stage import order_of
from tests.support.gpus import install_gpus, show_use
from worker.ranks.gpus import RankGpus, VramLedger

GONE = dataclasses.replace(this_process(), start_ticks=1)
"""A process whose pid another one has now."""


@pytest.fixture
def uuids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs; the ledger is in a directory of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install_gpus(tmp_path / "bin", 2)


@pytest.fixture
def ledger(tmp_path: Path) -> VramLedger:
    return VramLedger(tmp_path / "muster/gpu-leases")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("worker.ranks.gpus.time.monotonic", lambda: self.now)


def gpus_of(usable_mb: dict[str, int], vram_mb: int = 8000, **how: int) -> RankGpus:
    need = VramNeed(vram_mb=vram_mb, wait_seconds=3600, usable_mb=usable_mb)
    assignment = AgentAssignment(
        job_uid="uid",
        host="gpu-box",
        agent_number=1,
        token="",
        job_root="",
        address_file="",
        is_managed=False,
        orphan_timeout_seconds=0,
        stop_grace_seconds=0,
        agent_heartbeat_seconds=1,
        max_log_bytes=0,
        vram=need,
        **{"gpus_at_once": 1, **how},
    )
    return RankGpus(assignment)


def reserve(gpus: RankGpus, rank: int = 0, uid: str = "uid", running: int = 0) -> list[str]:
    """Return the GPUs that the rank sees."""
    with gpus.claimed(order_of(Path(), uid, ["true"], rank=rank), running) as (uuids, _):
        return uuids


def lease_of(gpu: str, mb: int, process: ProcessRecord, tag: str = "gone/0/0") -> Lease:
    how = {"process": process, "taken_at": 0, "renewed_at": 1e12}
    return Lease(tag=tag, holder="rank 0 of other", gpu=gpu, vram_mb=mb, **how)


def test_ranks_share_gpus_until_one_does_not_fit(uuids: list[str], ledger: VramLedger) -> None:
    gpus = gpus_of({uuids[0][:12]: 20_000, uuids[1]: 9000})
    shared = [reserve(gpus, rank) for rank in range(3)]
    assert shared == [[uuids[0]], [uuids[0]], [uuids[1]]]
    with pytest.raises(GpusBusy) as busy:
        reserve(gpus_of({uuids[0]: 20_000, uuids[1]: 9000}), uid="other")
    found = f"8000 MB of GPU memory on gpu-box: 4000 MB free on {uuids[0]}; next try in 30 s"
    assert str(busy.value) == f"waits for {found}"
    assert (busy.value.retry_after_seconds, busy.value.is_final) == (30, False)
    first, second, _ = ledger.read()
    assert (first.tag, first.holder, first.process) == ("uid/0/0", "rank 0 of job", this_process())
    gpus.hand_over(second.tag, GONE)
    gpus.release(first.tag)
    assert [it.tag for it in ledger.read()] == ["uid/2/0"]
    reserve(gpus)


def test_agents_at_the_same_moment_never_over_commit(uuids: list[str], ledger: VramLedger) -> None:
    def try_to_reserve(number: int) -> bool:
        try:
            return bool(reserve(gpus_of({uuids[0]: 29_000}), uid=str(number)))
        except GpusBusy:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(try_to_reserve, range(8))) == 3
    assert sum(it.vram_mb for it in ledger.read()) == 24_000


def test_a_start_that_fails_reserves_nothing(uuids: list[str], ledger: VramLedger) -> None:
    gpus, order = gpus_of({uuids[0]: 8000}), order_of(Path(), "uid", ["true"])
    with pytest.raises(OSError, match="no process"), gpus.claimed(order, 0):
        raise OSError("no process")
    assert ledger.read() == []


def test_pauses_grow_and_the_last_try_is_at_the_end_of_the_wait(
    uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gpus = Clock(monkeypatch), gpus_of({uuids[0]: 9000})
    reserve(gpus, 1)
    pauses = []
    while True:
        with pytest.raises(GpusBusy) as busy:
            reserve(gpus)
        if busy.value.is_final:
            break
        pauses.append(busy.value.retry_after_seconds or 0)
        clock.now += pauses[-1]
    assert pauses == [30, 60, 120, 240, *[300] * 10, 150]
    assert str(busy.value) == (
        "has waited 3600 s (vram_wait_seconds) for 8000 MB of GPU memory on gpu-box: "
        f"1000 MB free on {uuids[0]}; rank 1 of job holds 8000 MB of it"
    )


def test_a_wait_that_has_ended_does_not_count_for_the_next(
    uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gpus = Clock(monkeypatch), gpus_of({uuids[0]: 9000})
    reserve(gpus, 1)
    for _ in range(2):
        with pytest.raises(GpusBusy, match="next try in 30 s"):
            reserve(gpus)
        clock.now += 3500
        gpus.release("uid/1/0")
        reserve(gpus)
        gpus.release("uid/0/0")
        reserve(gpus, 1)


def test_what_is_measured_counts(uuids: list[str], tmp_path: Path) -> None:
    gpu = uuids[0]
    show_use(tmp_path / "bin", uuids, used=f"1, {gpu}, 3000\\n", free=f"{gpu}, 15000\\n")
    with pytest.raises(GpusBusy, match="15000 MB free"):
        reserve(gpus_of({gpu: 20_000}, 16_000))
    with pytest.raises(GpusBusy, match="14000 MB free"):
        reserve(gpus_of({gpu: 17_000}, 16_000))


def test_leases_of_the_dead_are_pruned_unless_their_ranks_live(
    uuids: list[str], ledger: VramLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ledger.locked():
        ledger.write([lease_of(uuids[0], 9000, GONE)])
    ranks = ["gone/0/0"]
    monkeypatch.setattr("worker.ranks.gpus.tagged_processes", ranks.count)
    gpus = gpus_of({uuids[0]: 9000})
    with pytest.raises(GpusBusy, match="0 MB free"):
        reserve(gpus)
    ranks.clear()
    reserve(gpus)
    assert [it.tag for it in ledger.read()] == ["uid/0/0"]


def test_renewed_leases_are_not_pruned(uuids: list[str], ledger: VramLedger) -> None:
    gpus = gpus_of({uuids[0]: 9000})
    reserve(gpus)
    with ledger.locked():
        (lease,) = ledger.read()
        ledger.write([replace(lease, renewed_at=lease.renewed_at - 86_000)])
    gpus.renew(["uid/0/0"])
    (renewed,) = ledger.read()
    assert renewed.renewed_at >= lease.renewed_at


def test_a_gang_reserves_nothing_until_all_fit(uuids: list[str], ledger: VramLedger) -> None:
    gang = gpus_of({uuids[0]: 16_000, uuids[1]: 8000}, gpus_at_once=3)
    with ledger.locked():
        ledger.write([lease_of(uuids[1], 1000, this_process(), "other/0/0")])
    with pytest.raises(GpusBusy, match="8000 MB of GPU memory for each of 3 ranks on gpu-box"):
        reserve(gang)
    gang.release("other/0/0")
    for rank in range(3):
        reserve(gang, rank, running=rank)


def test_whole_and_shared_gpus_exclude_each_other(uuids: list[str]) -> None:
    usable = dict.fromkeys(uuids, 9000)
    shared, whole = gpus_of(usable), gpus_of(usable, gpus_per_rank=1)
    with whole.claimed(order_of(Path(), "whole", ["true"]), 0) as (own, _):
        assert own == uuids[:1]
        assert reserve(shared) == uuids[1:]
        with pytest.raises(GpusBusy, match="found 0 of 1 free GPUs"):
            reserve(whole, uid="next")
        with pytest.raises(GpusBusy, match="1000 MB free"):
            reserve(shared, 1)
    reserve(shared, 1)
    with pytest.raises(GpusBusy), whole.claimed(order_of(Path(), "whole", ["true"]), 0):
        pass


def test_a_damaged_ledger_is_named(uuids: list[str], tmp_path: Path) -> None:
    gpus, file = gpus_of({uuids[0]: 9000}), tmp_path / f"muster/gpu-leases/{boot_id()}.json"
    reserve(gpus)
    file.write_text("[")
    with pytest.raises(OSError, match=f"{file} is damaged .*: remove it once no rank uses a GPU"):
        reserve(gpus, 1)
    gpus.release("uid/0/0")  # the end of a rank is no time for an error
    assert file.read_text() == "["


@pytest.mark.parametrize(("usable_mb", "per_rank"), [(7000, 0), (9000, 1)])
def test_a_host_that_can_never_do_is_refused(
    uuids: list[str], usable_mb: int, per_rank: int
) -> None:
    usable = {uuids[0]: usable_mb, "GPU-absent": 90_000}
    gpus = gpus_of(usable, gpus_per_rank=per_rank, gpus_at_once=2)
    with pytest.raises(InvalidProgram, match="GPUs of 8000 MB, as the cluster file") as refused:
        reserve(gpus)
    both = f"the cluster file names GPU-absent, and the host has {', '.join(uuids)}: correct it"
    assert both in str(refused.value)


@pytest.mark.parametrize("per_rank", [0, 1])
def test_a_board_whose_uuid_has_no_prefix_is_used(
    uuids: list[str], tmp_path: Path, per_rank: int
) -> None:
    board = uuids[0].removeprefix("GPU-")
    show_use(tmp_path / "bin", [board], free=f"{board}, [N/A]\\n")
    gpus = gpus_of({board: 9000}, gpus_per_rank=per_rank)
    assert reserve(gpus) == [], "CUDA_VISIBLE_DEVICES takes no such name"


def test_a_board_without_nvidia_smi_has_its_name(
    uuids: list[str], ledger: VramLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert reserve(gpus_of({"orin": 9000, uuids[0]: 90_000})) == []
    assert [it.gpu for it in ledger.read()] == ["orin"]
