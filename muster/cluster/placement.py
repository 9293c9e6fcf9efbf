"""Greedy placement: each rank goes to the eligible node with the highest score.

The score is ``(free memory / budget) * flops factor / (1 + load)``, where load is the number of
slots in use. Memory is that of a GPU, or main memory for a job with a RAM budget only; without a
budget the ratio is 1. The best GPU of a node counts.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from muster.cluster.description import Cluster, ClusterNode, Gpu, UndescribedNode
from muster.cluster.speed import CPU_FACTOR, flops_factor
from muster.contracts.job.spec import JobSpec


class RankRequest(NamedTuple):
    """A rank to be placed, of a job with these needs."""

    job_id: str
    spec: JobSpec
    preferred: str | None = None  # the node to take if the rank may run there, whatever its score


@dataclass(slots=True, kw_only=True)
class NodeUse:
    """What is taken on a node. ``NodeUse()``: nothing."""

    jobs: set[str] = field(default_factory=set)
    slots: int = 0
    ram_mb: int = 0
    vram_mb: dict[str, int] = field(default_factory=dict)
    """Reserved memory by uuid of the GPU. A GPU that a rank has for itself is reserved whole."""

    def add(self, node: ClusterNode, request: RankRequest, uuids: Collection[str]) -> None:
        """Add a rank that runs there with these GPUs."""
        spec = request.spec
        for gpu in node.gpus:
            if gpu.uuid in uuids:
                share = _free_vram(gpu, self) if spec.gpus_per_rank else spec.vram_mb or 0
                self.vram_mb[gpu.uuid] = self.vram_mb.get(gpu.uuid, 0) + share
        self.jobs.add(request.job_id)
        self.slots += 1
        self.ram_mb += spec.ram_mb or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a rank may run on a node (else `score` is None), why, and the uuids of its GPUs."""

    node: str
    score: float | None
    reason: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one rank goes, None if it fits nowhere, and the verdict on each node."""

    chosen: Verdict | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        return "; ".join(f"{verdict.node}: {verdict.reason}" for verdict in self.verdicts)


def place(
    cluster: Cluster,
    requests: Iterable[RankRequest],
    in_use: Mapping[str, NodeUse] | None = None,
    refusals: Mapping[str, str] = MappingProxyType({}),
) -> list[Placement]:
    """Return a placement per rank; each sees what the ranks before it have taken.

    `in_use` is what is taken already on every node; what these ranks take is added to it.
    `refusals` says why no rank can be started on some. Of equal scores the first node of the file
    wins.
    """
    uses = use_of(cluster, ()) if in_use is None else in_use
    placements = []
    for request in requests:
        verdicts = tuple(
            _verdict(node, request, uses[node.name], refusals.get(node.name, ""))
            for node in cluster.nodes
        )
        eligible = [verdict for verdict in verdicts if verdict.score is not None]
        chosen = max(
            eligible,
            key=lambda verdict: (verdict.node == request.preferred, verdict.score or 0.0),
            default=None,
        )
        if chosen:
            node = cluster.node(chosen.node)
            uses[node.name].add(node, request, chosen.gpus)
        placements.append(Placement(chosen=chosen, verdicts=verdicts))
    return placements


def use_of(cluster: Cluster, placed: Iterable[tuple[RankRequest, str]]) -> dict[str, NodeUse]:
    """Return what ranks take on the nodes on which they run; names of other nodes are left out."""
    nodes = {node.name: node for node in cluster.nodes}
    uses = {name: NodeUse() for name in nodes}
    for request, name in placed:
        if node := nodes.get(name):
            gpus = _suitable_gpus(node, request.spec, uses[name])[: request.spec.gpu_count]
            uses[name].add(node, request, [gpu.uuid for gpu in gpus])
    return uses


def _verdict(node: ClusterNode, request: RankRequest, use: NodeUse, refusal: str) -> Verdict:
    spec = request.spec
    gpus = _suitable_gpus(node, spec, use) if spec.gpu_count else []
    reason = refusal or _missing_slot(node, request, use)
    if not isinstance(node, UndescribedNode):
        reason = reason or _missing_memory(node, spec, use, len(gpus))
    if reason:
        return Verdict(node=node.name, score=None, reason=reason)
    if gpus:
        factor, budget = flops_factor(gpus[0].type), spec.vram_mb
        free = _free_vram(gpus[0], use)
    else:
        factor = max((flops_factor(gpu.type) for gpu in node.gpus), default=CPU_FACTOR)
        free, budget = (node.ram_mb or 0) - use.ram_mb, spec.ram_mb
    return Verdict(
        node=node.name,
        score=(free / budget if budget else 1.0) * factor / (1 + use.slots),
        reason=(f"{free}/{budget} MB" if budget else "1") + f" x {factor:g} / (1 + {use.slots})",
        gpus=tuple(gpu.uuid for gpu in gpus[: spec.gpu_count]),
    )


def _missing_slot(node: ClusterNode, request: RankRequest, use: NodeUse) -> str:
    """Return why no rank of the job may start on a node; empty if one may."""
    hosts, engine = request.spec.hosts, request.spec.engine
    if engine is not None and node.transport != engine:
        return f"agents are not started by {engine} there (engine)"
    if hosts is not None and node.name not in hosts:
        if not hosts:
            return "its checkpoints are on the disk of the coordinator's host"
        return f"this rank may run on {', '.join(hosts)} only (hosts, or where it saves)"
    if isinstance(node, UndescribedNode) and use.jobs <= {request.job_id}:
        return ""  # it runs alone there, and may be larger than all slots
    if request.job_id not in use.jobs and len(use.jobs) >= node.max_adapters:
        return f"jobs there: {len(use.jobs)} of {node.max_adapters}, its max_adapters"
    if node.rank_slots is not None and use.slots >= node.rank_slots:
        return f"slots in use: {use.slots} of {node.rank_slots}"
    return ""


def _missing_memory(node: ClusterNode, spec: JobSpec, use: NodeUse, suitable_gpus: int) -> str:
    """Return which memory a node lacks for a rank; empty if it has enough."""
    if spec.ram_mb is not None:
        if node.ram_mb is None:
            return "its ram_mb is not in the cluster file"
        if (free := node.ram_mb - use.ram_mb) < spec.ram_mb:
            return f"free RAM: {free} MB, and a rank needs {spec.ram_mb}"
    needed = spec.gpu_count
    if needed and not node.gpus:
        return "it has no GPU"
    if suitable_gpus < needed:
        kind = "unused GPUs" if spec.gpus_per_rank else "GPUs"
        memory = f" with {spec.vram_mb} MB free" if spec.vram_mb else ""
        return f"{kind}{memory}: {suitable_gpus} of {len(node.gpus)}, and a rank needs {needed}"
    return ""


def _suitable_gpus(node: ClusterNode, spec: JobSpec, use: NodeUse) -> list[Gpu]:
    """Return the GPUs that a rank may have, the one with the highest score first."""
    suitable = [
        gpu
        for gpu in node.gpus
        if _free_vram(gpu, use) >= (spec.vram_mb or 0)
        # A rank with gpus_per_rank shares its GPUs with no other.
        and not (spec.gpus_per_rank and use.vram_mb.get(gpu.uuid))
    ]

    def worth(gpu: Gpu) -> float:
        return (_free_vram(gpu, use) if spec.vram_mb else 1) * flops_factor(gpu.type)

    return sorted(suitable, key=worth, reverse=True)


def _free_vram(gpu: Gpu, use: NodeUse) -> int:
    return gpu.usable_vram_mb - use.vram_mb.get(gpu.uuid, 0)
