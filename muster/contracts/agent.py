"""What an agent is told when it is started, and what it tells the template it forks ranks from.

An agent reads its assignment from standard input, not from the command line or the environment:
those can be read by others of the same machine.
"""

import struct
from typing import Final

import msgspec

from muster.contracts.process import ProcessRecord

FORKED_PID: Final = struct.Struct("<q")
"""The template's answer to a `ForkRequest`."""


class AdoptedRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's process that an earlier agent started, and that its successor looks after."""

    rank: int
    incarnation: int
    process: ProcessRecord
    mark: str
    """What `muster.contracts.environ.MARK` says in it and in all that it started."""


class AgentAssignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one agent needs to know."""

    job_uid: str
    generation: int
    token: str
    """Proves to the coordinator that this is the agent it started."""
    job_root: str
    """The job's directory, see `muster.contracts.layout.JobFiles`."""
    address_file: str
    """Holds a `CoordinatorAddress`; read anew at every attempt to connect."""
    is_managed: bool
    """The ranks run a training of ours, as it is: they may be forked from a warm template."""
    orphan_timeout_seconds: float
    """Without a coordinator for this long, ranks are asked to save and exit."""
    stop_grace_seconds: float
    pulse_seconds: float
    """Between two signs of life of its own, see `muster.contracts.messages.Pulse`."""
    secrets: dict[str, str] = {}
    """The job's references by the names of their variables, see `muster.contracts.secrets`."""
    safe: str = ""
    """The directory that ``file:`` references are about."""
    lent: dict[str, str] = {}
    """What the service lends of its environment: each of the job's ``env:`` references that can be
    followed, by its name. It is in this value and in no environment but that of ranks."""
    adopted: tuple[AdoptedRank, ...] = ()
    """Every process of the job that is to live on. What else runs of the job is ended first."""


class CoordinatorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the present coordinator listens for agents."""

    host: str
    port: int
    process: ProcessRecord | None = None
    """Who that is, for whoever cannot ask the database."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a forked rank is given, beside two descriptors: its log and its channel."""

    environment: dict[str, str]
    working_dir: str
