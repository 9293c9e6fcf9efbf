"""Engines: what starts the agents of a job, and what a job may ask of each.

`local` and `ssh` start agents on machines that the service knows. A scheduler chooses the machine
itself: it gets one job of its own for each agent, so that growing is to submit and shrinking is to
cancel. Each of these jobs counts as a host of the job, such as ``slurm-1``.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

Engine: TypeAlias = Literal["local", "ssh", "slurm", "kubernetes"]

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]


def _text(pattern: str, meaning: str, wanted: str) -> Meta:
    # None begins with "-", which commands would take for an option.
    return Meta(pattern=f"^{pattern}$", description=meaning, extra={"wanted": wanted})


_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.,:=+&|*()\[\]-]{0,127}"
_NAME_WANTED: Final = "use a name as the commands of Slurm take it"


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every scheduler is asked for."""

    ranks_per_host: Annotated[_Count, Meta(description="Ranks of one agent.")] = 1
    cpus_per_rank: Annotated[_Count, Meta(description="Processors for each of them.")] = 1


class SlurmOptions(SchedulerOptions, frozen=True, kw_only=True):
    """`sbatch` has options of the same names."""

    partition: Annotated[str, _text(_NAME, "The partition.", _NAME_WANTED)] | None = None
    account: Annotated[str, _text(_NAME, "The account.", _NAME_WANTED)] | None = None
    qos: Annotated[str, _text(_NAME, "The quality of service.", _NAME_WANTED)] | None = None
    constraint: Annotated[str, _text(_NAME, "Features of the node.", _NAME_WANTED)] | None = None
    gres: Annotated[str, _text(_NAME, "Such as gpu:2.", _NAME_WANTED)] | None = None
    mem: (
        Annotated[str, _text("[0-9]{1,9}[KMGT]?", "Main memory.", "use a size such as 8G")] | None
    ) = None
    time: (
        Annotated[
            str,
            _text(
                "[0-9]{1,6}(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}",
                "The limit. Ranks save and exit a minute before it, and go on in another job.",
                "use minutes, hours:minutes:seconds or days-hours",
            ),
        ]
        | None
    ) = None


class KubernetesOptions(SchedulerOptions, frozen=True, kw_only=True):
    """Parts of the Pod of an agent."""

    image: Annotated[
        str,
        _text(
            "[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,255}",
            "With Muster, the job's program and all that this imports.",
            "use an image as kubectl run takes it",
        ),
    ]
    mem: (
        Annotated[
            str, _text("[0-9]{1,9}(Mi|Gi|Ti)", "Main memory of a Pod.", "use a size such as 8Gi")
        ]
        | None
    ) = None
    gpus: Annotated[int, Meta(ge=0, le=64, description="nvidia.com/gpu of a Pod.")] = 0
    node_selector: Annotated[dict[str, str], Meta(description="Labels of the node.")] = {}
    tolerations: Annotated[
        tuple[dict[str, Any], ...], Meta(description="As in a Pod; of tainted nodes.")
    ] = ()
    claim: (
        Annotated[
            str,
            _text(
                "[a-z0-9][a-z0-9.-]{0,252}",
                "A persistent volume claim with data and checkpoints.",
                "use the name of a claim",
            ),
        ]
        | None
    ) = None
    claim_path: Annotated[
        str, _text("/[A-Za-z0-9_./-]{1,255}", "Where a Pod sees it.", "use an absolute path")
    ] = "/data"


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


def agent_job_name(job_uid: str, host: str, generation: int) -> str:
    """Return what an engine calls the job of one agent.

    It follows from what is durable before anything is submitted, so that any coordinator finds it.
    """
    return f"{agent_job_prefix(job_uid, host)}{generation}"


def agent_job_prefix(job_uid: str, host: str) -> str:
    """Return how the names of a host's agents begin; the generation follows."""
    return f"muster-{job_uid}-{host}-g"


def uid_in(agent_job_name: str) -> str | None:
    """Return the uid of the job to which an agent belongs; None if the name is no agent's."""
    found = re.fullmatch(r"muster-([^-]+)-.+-g[0-9]+", agent_job_name)
    return found[1] if found else None
