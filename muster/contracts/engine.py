"""Engines: what starts the agents of a job, and what a job may ask of each.

`local` and `ssh` start agents on machines that the service knows. A scheduler chooses the machine
itself: it gets one job of its own for each agent, so that growing is to submit and shrinking is to
cancel. Each of these jobs counts as a host of the job, such as ``slurm-1``.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

Engine: TypeAlias = Literal["local", "ssh", "slurm"]

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]


def _text(pattern: str, meaning: str, wanted: str) -> Meta:
    # None begins with "-", which commands would take for an option.
    return Meta(pattern=f"^{pattern}$", description=meaning, extra={"wanted": wanted})


_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.,:=+&|*()\[\]-]{0,127}"
_NAME_WANTED: Final = "use a name as the commands of Slurm take it"


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each Slurm job of a job asks for; `sbatch` has options of the same names."""

    ranks_per_host: Annotated[_Count, Meta(description="Ranks of one Slurm job.")] = 1
    cpus_per_rank: Annotated[_Count, Meta(description="Processors for each of them.")] = 1
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


SCHEDULERS: Final[Mapping[str, type[SlurmOptions]]] = {"slurm": SlurmOptions}
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
