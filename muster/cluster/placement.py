"""Greedy placement: each rank goes to the eligible node with the highest score.

The score is ``(free memory / budget) * flops factor / (1 + load)``, where load is the number of
slots in use. Memory is that of a GPU, or main memory for a job that has only a RAM budget; a job
without a budget counts as if its ratio were 1. The best GPU of a node counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from muster.cluster.description import Cluster, ClusterNode, Gpu
from muster.cluster.speed import CPU_FACTOR, flops_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """What one rank of a job needs, as the fields of the same names in a `JobSpec` say."""

    job_id: str
    vram_mb: int | None = None
    ram_mb: int | None = None
    gpus_per_rank: int = 0
    hosts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What is taken on a node. ``NodeUse()``: nothing."""

    jobs: frozenset[str] = frozenset()
    slots: int = 0
    ram_mb: int = 0
    vram_mb: Mapping[str, int] = field(default_factory=dict)
    """Reserved memory by uuid of the GPU. A GPU that a rank has for itself is reserved whole."""


UNUSED: Final = NodeUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a rank may run on a node, and why."""

    node: str
    score: float | None
    """None: it may not."""
    reason: str
    gpus: tuple[str, ...] = ()
    """The uuids of the GPUs that the rank would have a part of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one rank goes, and what was said of each node."""

    chosen: Verdict | None
    """None: the rank does not fit anywhere."""
    verdicts: tuple[Verdict, ...]


def place(
    cluster: Cluster,
    requests: Iterable[RankRequest],
    in_use: Mapping[str, NodeUse] = MappingProxyType({}),
) -> list[Placement]:
    """Return a placement per rank; each sees what the ranks before it have taken.

    `in_use` holds what is taken already, by node. Of equal scores the first node of the file wins.
    """
    uses = {node.name: in_use.get(node.name, UNUSED) for node in cluster.nodes}
    placements = []
    for request in requests:
        verdicts = tuple(_judge(node, request, uses[node.name]) for node in cluster.nodes)
        eligible = [it for it in verdicts if it.score is not None]
        chosen = max(eligible, key=lambda it: it.score or 0.0, default=None)
        if chosen is not None:
            node = next(node for node in cluster.nodes if node.name == chosen.node)
            uses[node.name] = _with_rank(uses[node.name], node, request, chosen.gpus)
        placements.append(Placement(chosen=chosen, verdicts=verdicts))
    return placements


def _judge(node: ClusterNode, request: RankRequest, use: NodeUse) -> Verdict:
    reason = _obstacle(node, request, use)
    if reason is not None:
        return Verdict(node=node.name, score=None, reason=reason)
    gpus = _suitable_gpus(node, request, use)[: max(1, request.gpus_per_rank)]
    if gpus:
        best, factor = gpus[0], flops_factor(gpus[0].type)
        free, budget = _free_vram(best, use), request.vram_mb
    else:
        factor = max((flops_factor(gpu.type) for gpu in node.gpus), default=CPU_FACTOR)
        free, budget = (node.ram_mb or 0) - use.ram_mb, request.ram_mb
    ratio = 1.0 if budget is None else free / budget
    memory = "1" if budget is None else f"{free}/{budget} MB"
    return Verdict(
        node=node.name,
        score=ratio * factor / (1 + use.slots),
        reason=f"{memory} x {factor:g} / (1 + {use.slots})",
        gpus=tuple(gpu.uuid for gpu in gpus),
    )


def _obstacle(node: ClusterNode, request: RankRequest, use: NodeUse) -> str | None:
    """Return why a rank may not run on a node now; None if it may."""
    if request.hosts is not None and node.name not in request.hosts:
        return f"the job allows only {', '.join(request.hosts)}"
    if request.job_id not in use.jobs and len(use.jobs) >= node.max_adapters:
        return f"jobs there: {len(use.jobs)} of {node.max_adapters} (max_adapters)"
    if node.rank_slots is not None and use.slots >= node.rank_slots:
        return f"slots in use: {use.slots} of {node.rank_slots}"
    return _missing_ram(node, request, use) or _missing_gpus(node, request, use)


def _missing_ram(node: ClusterNode, request: RankRequest, use: NodeUse) -> str | None:
    if request.ram_mb is None:
        return None
    if node.ram_mb is None:
        return "its ram_mb is not in the description"
    free = node.ram_mb - use.ram_mb
    if free >= request.ram_mb:
        return None
    return f"free RAM: {free} MB, and a rank needs {request.ram_mb}"


def _missing_gpus(node: ClusterNode, request: RankRequest, use: NodeUse) -> str | None:
    if not _needs_gpu(request):
        return None
    if not node.gpus:
        return "it has no GPU"
    suitable, needed = len(_suitable_gpus(node, request, use)), max(1, request.gpus_per_rank)
    if suitable >= needed:
        return None
    kind = "unused GPUs" if request.gpus_per_rank else "GPUs"
    memory = "" if request.vram_mb is None else f" with {request.vram_mb} MB free"
    return f"{kind}{memory}: {suitable} of {len(node.gpus)}, and a rank needs {needed}"


def _suitable_gpus(node: ClusterNode, request: RankRequest, use: NodeUse) -> list[Gpu]:
    """Return the GPUs that a rank may have, the one with the highest score first."""
    if not _needs_gpu(request):
        return []
    free = {gpu: _free_vram(gpu, use) for gpu in node.gpus}
    suitable = [
        gpu
        for gpu in node.gpus
        if free[gpu] >= (request.vram_mb or 0)
        # A rank with gpus_per_rank shares its GPUs with no other.
        and not (request.gpus_per_rank and use.vram_mb.get(gpu.uuid))
    ]
    weight = free if request.vram_mb is not None else dict.fromkeys(node.gpus, 1)
    return sorted(suitable, key=lambda gpu: weight[gpu] * flops_factor(gpu.type), reverse=True)


def _needs_gpu(request: RankRequest) -> bool:
    return request.vram_mb is not None or request.gpus_per_rank > 0


def _free_vram(gpu: Gpu, use: NodeUse) -> int:
    return gpu.usable_vram_mb - use.vram_mb.get(gpu.uuid, 0)


def _with_rank(
    use: NodeUse, node: ClusterNode, request: RankRequest, uuids: Sequence[str]
) -> NodeUse:
    """Return what is taken once a rank runs there with these GPUs."""
    reserved = dict(use.vram_mb)
    for gpu in node.gpus:
        if gpu.uuid in uuids:
            whole = gpu.usable_vram_mb if request.gpus_per_rank else None
            reserved[gpu.uuid] = whole or reserved.get(gpu.uuid, 0) + (request.vram_mb or 0)
    return NodeUse(
        jobs=use.jobs | {request.job_id},
        slots=use.slots + 1,
        ram_mb=use.ram_mb + (request.ram_mb or 0),
        vram_mb=reserved,
    )
