"""Engines: what starts the agents of a job, and what a job may ask of each.

`local`, `ssh` and `mesh` start agents on machines that the service knows. A scheduler chooses the
machine itself: it gets one job of its own for each agent, so that growing is to submit and
shrinking is to cancel. Each of these jobs counts as a host of the job, such as ``slurm-1``.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

Engine: TypeAlias = Literal["local", "ssh", "mesh", "slurm", "kubernetes"]

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]


def _text(pattern: str, wanted: str) -> Meta:
    # None begins with "-", which commands would take for an option.
    return Meta(pattern=f"^{pattern}$", extra={"wanted": wanted})


_SlurmName: TypeAlias = Annotated[
    str,
    _text(
        r"[A-Za-z0-9_][A-Za-z0-9_.,:=+&|*()\[\]-]{0,127}",
        "use a name as the commands of Slurm take it",
    ),
]
_SlurmSize: TypeAlias = Annotated[str, _text("[0-9]{1,9}[KMGT]?", "use a size such as 8G")]
_SlurmTime: TypeAlias = Annotated[
    str,
    _text(
        "[0-9]{1,6}(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}",
        "use minutes, hours:minutes:seconds or days-hours",
    ),
]
_Image: TypeAlias = Annotated[
    str, _text("[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,255}", "use an image as kubectl run takes it")
]
_PodSize: TypeAlias = Annotated[str, _text("[0-9]{1,9}(Mi|Gi|Ti)", "use a size such as 8Gi")]
_ObjectName: TypeAlias = Annotated[str, _text("[a-z0-9][a-z0-9.-]{0,252}", "use a Kubernetes name")]
_PodPath: TypeAlias = Annotated[str, _text("/[A-Za-z0-9_./-]{1,255}", "use an absolute path")]


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every scheduler is asked for."""

    ranks_per_host: _Count = 1  # of one agent
    cpus_per_rank: _Count = 1


class SlurmOptions(SchedulerOptions, frozen=True, kw_only=True):
    """`sbatch` has options of the same names."""

    partition: _SlurmName | None = None
    account: _SlurmName | None = None
    qos: _SlurmName | None = None
    constraint: _SlurmName | None = None  # features of the node
    gres: _SlurmName | None = None  # such as gpu:2
    mem: _SlurmSize | None = None
    time: _SlurmTime | None = None
    """The limit. Ranks save and exit a minute before it, and go on in another job."""


class KubernetesOptions(SchedulerOptions, frozen=True, kw_only=True):
    """Parts of the Pod of an agent."""

    image: _Image  # with Muster, the job's program and all that this imports
    image_pull_secrets: tuple[_ObjectName, ...] = ()  # of the registry
    priority_class: _ObjectName | None = None
    mem: _PodSize | None = None
    mem_limit: _PodSize | None = None  # above it processes are killed; /dev/shm counts
    gpus: Annotated[int, Meta(ge=0, le=64)] = 0  # nvidia.com/gpu
    node_selector: dict[str, str] = {}  # labels of the node
    tolerations: tuple[dict[str, Any], ...] = ()  # as in a Pod; of tainted nodes
    claim: _ObjectName | None = None  # a persistent volume claim with data and checkpoints
    claim_path: _PodPath = "/data"  # where a Pod sees it


SCHEDULERS: Final[Mapping[str, type[SlurmOptions] | type[KubernetesOptions]]] = {
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
}
"""By engine: the options of those that choose the machines."""


def scheduled_hosts(engine: str, ranks: int, ranks_per_host: int) -> tuple[str, ...]:
    """Return the hosts of a job that has at most so many ranks."""
    return tuple(f"{engine}-{number + 1}" for number in range(-(-ranks // ranks_per_host)))


def engine_row(engine: str) -> str:
    """Return the name under which what a scheduler says is kept; no host has such a name."""
    return f"engine:{engine}"


def agent_job_name(job_uid: str, host: str, agent_number: int) -> str:
    """Return what an engine calls the job of one agent.

    It follows from what is durable before anything is submitted, so that any coordinator finds it.
    """
    return f"{agent_job_prefix(job_uid, host)}{agent_number}"


def agent_job_prefix(job_uid: str, host: str) -> str:
    """Return how the names of a host's agents begin; the agent's number follows."""
    return f"muster-{job_uid}-{host}-a"


def uid_in(agent_job_name: str) -> str | None:
    """Return the uid of the job to which an agent belongs; None if the name is no agent's."""
    found = re.fullmatch(r"muster-([^-]+)-.+-a[0-9]+", agent_job_name)
    return found[1] if found else None
