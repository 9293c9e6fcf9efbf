"""Where ranks go, why, and whether a GPU is worth it."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cluster.description import Cluster, ClusterNode, Gpu
from muster.cluster.placement import NodeUse, RankRequest, place, use_of
from muster.cluster.speed import GpuCost, flops_factor, is_gpu_worth
from muster.contracts.job.spec import JobSpec


def node(name: str, *gpus: str, **fields: object) -> ClusterNode:
    """Return a node with these GPUs of 10 000 MB, of which 8 500 are usable."""
    found = (Gpu(uuid=f"{name}{i}", type=gpu, vram_mb=10_000) for i, gpu in enumerate(gpus))
    return ClusterNode(name=name, host=name, gpus=tuple(found), **fields)


def cluster(*nodes: ClusterNode) -> Cluster:
    return Cluster(nodes=nodes)


def chosen(
    machines: Cluster, ranks: int = 1, in_use: dict[str, NodeUse] | None = None, **needs: object
) -> list[str | None]:
    """Return the node of each rank of a job."""
    uses = use_of(machines, ()) | deepcopy(in_use or {})
    placed = place(machines, [RankRequest("job", JobSpec(**needs))] * ranks, uses)
    return [one.chosen and one.chosen.node for one in placed]


SMALL, FAST, SLOW = node("small", ram_mb=16_000), node("fast", "RTX 4090"), node("slow", "RTX 3080")
BUSY = {"fast": NodeUse(jobs={"job"}, slots=2)}


@pytest.mark.parametrize(
    ("nodes", "needs", "in_use", "expected"),
    [
        ([SLOW, FAST], {"vram_mb": 4000}, {}, ["fast"]),
        # 0.45 beats 1.0 / 3
        ([FAST, SLOW], {"vram_mb": 4000}, BUSY, ["slow"]),
        ([SLOW, node("s2", "RTX 3080")], {"vram_mb": 4000}, {}, ["slow"]),
        ([node("s2", "RTX 3080"), SLOW], {"vram_mb": 4000}, {}, ["s2"]),
        ([SMALL], {"vram_mb": 1}, {}, [None]),
        ([SMALL], {"vram_mb": 1, "ram_mb": 1}, {}, [None]),
        ([SMALL], {"ram_mb": 16_000}, {}, ["small"]),
        ([SMALL], {"ram_mb": 16_001}, {}, [None]),
        ([FAST], {"vram_mb": 8_500}, {}, ["fast"]),
        ([FAST], {"vram_mb": 8_501}, {}, [None]),
        ([FAST], {"vram_mb": 8_500}, {"fast": NodeUse(vram_mb={"fast0": 1})}, [None]),
        ([FAST], {"ram_mb": 1}, {}, [None]),
        ([node("box", "T", "RTX 4090"), SLOW], {"vram_mb": 4000}, {}, ["box"]),
        ([FAST, SLOW], {"hosts": ("slow",)}, {}, ["slow"]),
        ([FAST], {}, {"fast": NodeUse(jobs={"other"})}, [None]),
        ([node("few", slots=2)], {}, {"few": NodeUse(slots=2)}, [None]),
        ([SMALL, SLOW, FAST], {}, {}, ["fast"]),
    ],
    ids=[
        "faster GPU",
        "load",
        "tie",
        "tie in the other order",
        "VRAM on CPU-only",
        "VRAM and RAM on CPU-only",
        "RAM on CPU-only",
        "too little RAM",
        "all usable VRAM",
        "more than usable VRAM",
        "reserved VRAM",
        "unknown RAM",
        "best GPU of a node",
        "allowed hosts",
        "max_adapters",
        "slots",
        "no budget",
    ],
)
def test_rank_goes_to_the_highest_score(
    nodes: list[ClusterNode],
    needs: dict[str, object],
    in_use: dict[str, NodeUse],
    expected: list[str | None],
) -> None:
    assert chosen(cluster(*nodes), in_use=in_use, **needs) == expected


def test_ranks_see_what_earlier_ranks_took() -> None:
    machines = cluster(SLOW, FAST)
    assert chosen(machines, ranks=5, vram_mb=4000) == ["fast", "slow", "fast", "slow", None]


def test_rank_with_its_own_gpus_shares_none() -> None:
    machines = cluster(node("box", "RTX 4090", "RTX 4090", "RTX 3080", max_adapters=3))
    own = JobSpec(command=("true",), gpus_per_rank=2)
    requests = [
        RankRequest("shared", JobSpec(vram_mb=1000)),
        RankRequest("own", own),
        RankRequest("own", own),
        RankRequest("later", JobSpec(vram_mb=1000)),
    ]
    placed = place(machines, requests)
    taken = [one.chosen.gpus if one.chosen else None for one in placed]
    assert taken == [("box0",), ("box1", "box2"), None, ("box0",)]
    assert placed[2].verdicts[0].reason == "unused GPUs: 0 of 3, and a rank needs 2"


REQUESTS = st.builds(
    RankRequest,
    job_id=st.sampled_from("abc"),
    spec=st.builds(
        JobSpec,
        vram_mb=st.none() | st.integers(1, 9000),
        ram_mb=st.none() | st.integers(1, 9000),
        gpus_per_rank=st.integers(0, 2),
    ),
)


@pytest.mark.slow
@given(st.lists(REQUESTS, max_size=12))
def test_placement_never_overcommits_a_node(requests: list[RankRequest]) -> None:
    machines = cluster(
        node("box", "RTX 4090", "T", ram_mb=16_000, max_adapters=2, slots=5),
        node("bare", ram_mb=9000, slots=2),
    )
    placed = list(zip(requests, place(machines, requests), strict=True))
    for machine in machines.nodes:
        there = [
            (request, one.chosen.gpus)
            for request, one in placed
            if one.chosen and one.chosen.node == machine.name
        ]
        assert len(there) <= (machine.rank_slots or 0)
        assert len({request.job_id for request, _ in there}) <= machine.max_adapters
        assert sum(request.spec.ram_mb or 0 for request, _ in there) <= (machine.ram_mb or 0)
        for gpu in machine.gpus:
            specs = [request.spec for request, gpus in there if gpu.uuid in gpus]
            assert len(specs) <= 1 or not any(spec.gpus_per_rank for spec in specs)
            assert sum(spec.vram_mb or 0 for spec in specs) <= gpu.usable_vram_mb


def test_every_node_has_a_reason() -> None:
    machines = cluster(SMALL, FAST, SLOW, node("busy", "H100"), node("full", "H100", slots=1))
    in_use = {
        "busy": NodeUse(jobs={"other"}),
        "full": NodeUse(jobs={"job"}, slots=1),
        "slow": NodeUse(vram_mb={"slow0": 8000}),
        "fast": NodeUse(jobs={"job"}, slots=1),
    }
    allowed = ("small", "fast", "slow", "busy", "full")
    request = RankRequest("job", JobSpec(vram_mb=4000, hosts=allowed))
    (placed,) = place(machines, [request], use_of(machines, ()) | in_use)
    assert {it.node: (it.score, it.reason) for it in placed.verdicts} == {
        "small": (None, "it has no GPU"),
        "fast": (8500 / 4000 * 1.0 / 2, "8500/4000 MB x 1 / (1 + 1)"),
        "slow": (None, "GPUs with 4000 MB free: 0 of 1, and a rank needs 1"),
        "busy": (None, "jobs there: 1 of 1, its max_adapters"),
        "full": (None, "slots in use: 1 of 1"),
    }


def test_score_without_vram_budget_uses_ram_or_one() -> None:
    machines = cluster(node("box", "A100", "H100", ram_mb=8000), SMALL)
    for needs, scores in [({"ram_mb": 4000}, [2 * 2.0, 4 * 0.01]), ({}, [2.0, 0.01])]:
        (placed,) = place(machines, [RankRequest("job", JobSpec(**needs))])
        assert [it.score for it in placed.verdicts] == scores


@pytest.mark.parametrize(
    ("gpu", "factor"),
    [
        ("NVIDIA GeForce RTX 4090", 1.0),
        ("rtx4080", 0.72),
        ("RTX 3090 Ti", 0.55),
        ("RTX-3080", 0.45),
        ("NVIDIA A100-SXM4-80GB", 1.2),
        ("NVIDIA H100 PCIe", 2.0),
        ("Jetson AGX Orin", 0.06),
        ("Jetson Orin Nano", 0.06),
        ("Jetson Nano", 0.02),
        ("RTX A1000", 0.5),
        ("Radeon", 0.5),
    ],
)
def test_gpu_is_known_in_any_spelling(gpu: str, factor: float) -> None:
    assert flops_factor(gpu) == factor


@pytest.mark.parametrize(
    ("transfer_mb", "compute_mflop", "cost", "is_worth"),
    [
        (1, 100, GpuCost(), False),
        (1, 1_000_000, GpuCost(), True),
        (1, 20_000, GpuCost(), False),
        (1, 20_001, GpuCost(), True),
        (1, 20_000, GpuCost(min_ratio=4), True),
        (1, 20_000, GpuCost(transfer_us_per_mb=39), True),
        (1, 20_000, GpuCost(compute_us_per_mflop=0.02), True),
    ],
)
def test_gpu_is_worth_it_above_the_ratio(
    transfer_mb: float, compute_mflop: float, cost: GpuCost, *, is_worth: bool
) -> None:
    assert is_gpu_worth(transfer_mb, compute_mflop, cost) is is_worth


def test_a_node_where_no_rank_can_be_started_says_why() -> None:
    why = "its data directory cannot be written"
    machines, refusals = Cluster(nodes=(FAST, SLOW)), {"fast": why, "gone": "unknown"}
    (placed,) = place(machines, [RankRequest("job", JobSpec())], refusals=refusals)
    assert placed.chosen is not None
    assert placed.chosen.node == "slow"
    (placed,) = place(machines, [RankRequest("job", JobSpec(hosts=("fast",)))], refusals=refusals)
    assert placed.chosen is None
    assert str(placed).startswith(f"fast: {why}; slow: this rank may run on fast only")
