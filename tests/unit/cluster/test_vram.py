"""The arithmetic of the ledger of GPU memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from muster.cluster import vram
from muster.cluster.vram import LEASE_SECONDS, SETTLED_SECONDS, Lease, choose, free_mb
from muster.contracts.rank import ProcessRecord

NOW = 1_000_000.0
PROCESS = ProcessRecord(pid=7, start_ticks=1, boot_id="boot", node="box", pid_namespace=1)


def lease(tag: str = "job/0/0", gpu: str = "A", mb: int = 4000, **how: object) -> Lease:
    known = {"holder": "rank 0 of job", "process": PROCESS, "taken_at": NOW, "renewed_at": NOW}
    return Lease(tag=tag, gpu=gpu, vram_mb=mb, **{**known, **how})


@pytest.mark.parametrize(
    ("peak_mb", "age_seconds", "counted"),
    [
        (0, 0, 4000),
        (0, SETTLED_SECONDS, 4000),  # it has not reached its GPU, or cannot be measured
        (1500, SETTLED_SECONDS - 1, 4000),
        (1500, SETTLED_SECONDS, 1500),
        (4500, 0, 4500),  # it takes more than its job asked for
        (4500, SETTLED_SECONDS, 4500),
    ],
)
def test_measured_use_replaces_the_estimate(peak_mb: int, age_seconds: float, counted: int) -> None:
    assert lease(peak_mb=peak_mb).counted_mb(NOW + age_seconds) == counted


def test_leases_of_dead_processes_and_old_ones_are_pruned() -> None:
    dead, old = lease("dead"), lease("old", renewed_at=NOW - LEASE_SECONDS)
    kept = [lease("young", renewed_at=NOW - LEASE_SECONDS + 1), lease()]
    assert vram.prune([dead, old, *kept], NOW, lambda it: it.tag == "dead") == kept
    (renewed,) = vram.change([old], "old", renewed_at=NOW)
    assert vram.prune([renewed], NOW, lambda _: False) == [renewed]


def test_a_lease_changes_hands_and_is_released() -> None:
    rank = ProcessRecord(pid=8, start_ticks=2, boot_id="boot", node="box", pid_namespace=1)
    first, second = lease("first"), lease("second")
    handed = vram.change([first, second], "first", process=rank)
    assert handed == [replace(first, process=rank), second]
    assert vram.release(handed, "first") == [second]


def test_the_highest_measured_use_counts() -> None:
    leases = [lease(peak_mb=1000), lease("other", peak_mb=900)]
    use = {("job/0/0", "A"): 800, ("other", "A"): 950, ("other", "B"): 5000}
    assert [it.peak_mb for it in vram.measure(leases, use)] == [1000, 950]


@pytest.mark.parametrize(
    ("used", "unused", "free"),
    [
        ({}, {}, {"A": 4000, "B": 5000}),
        # What a lease covers is not counted twice, what others use is.
        ({("job/0/0", "A"): 3500, ("", "A"): 500}, {}, {"A": 3500, "B": 5000}),
        ({("job/0/0", "B"): 100, ("", "C"): 500}, {}, {"A": 4000, "B": 4900}),
        ({}, {"A": 300, "B": 9000}, {"A": 300, "B": 5000}),
        ({("", "A"): 9000}, {}, {"A": 0, "B": 5000}),
    ],
)
def test_free_memory(
    used: dict[tuple[str, str], int], unused: dict[str, int], free: dict[str, int]
) -> None:
    leases = [lease(), lease(gpu="C")]
    assert free_mb({"A": 8000, "B": 5000}, leases, used, unused, NOW) == free


@pytest.mark.parametrize(
    ("free", "count", "gpu"),
    [
        ({}, 1, None),
        ({"A": 3999}, 1, None),
        ({"A": 4000, "B": 5000}, 1, "B"),
        ({"A": 5000, "B": 5000}, 1, "A"),
        ({"A": 8000, "B": 7000}, 3, "A"),
        ({"A": 7000, "B": 7000}, 3, None),
    ],
)
def test_a_gpu_is_chosen_if_all_ranks_fit(
    free: dict[str, int], count: int, gpu: str | None
) -> None:
    assert choose(free, 4000, count) == gpu


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from("ABC"), st.integers(0, 24_000), min_size=1),
    st.lists(st.integers(1, 9000), max_size=12),
)
def test_no_gpu_is_over_committed(usable: dict[str, int], wanted: list[int]) -> None:
    leases: list[Lease] = []
    for number, mb in enumerate(wanted):
        free = free_mb(usable, leases, {}, {}, NOW)
        gpu = choose(free, mb, 1)
        if gpu is None:
            assert max(free.values()) < mb, "what fits is not refused"
        else:
            leases.append(lease(str(number), gpu, mb))
    for gpu, mb in usable.items():
        assert sum(it.vram_mb for it in leases if it.gpu == gpu) <= mb
    for it in leases:
        leases = vram.release(leases, it.tag)
    assert free_mb(usable, leases, {}, {}, NOW) == usable
