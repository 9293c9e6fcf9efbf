"""What starts an agent and a rank: an assignment on standard input, and orders to fork."""

import struct
from typing import Final

import msgspec

from muster.contracts.location import Moves
from muster.contracts.rank import ProcessRecord

# What an agent reads from its standard input, which other users of the machine cannot read


class CoordinatorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address where a coordinator accepts agents."""

    host: str
    port: int
    number: tuple[int, int] = (0, 0)
    """The coordinator's epoch, and which way to it: 0 on its own host, whose processes need prove
    nothing; another one for each port that SSH has forwarded."""

    @property
    def place(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def is_remote(self) -> bool:
        return self.number[1] > 0

    @property
    def is_on_this_host(self) -> bool:
        """True if a coordinator of the host with this file has written it; it has an epoch."""
        return self.number[0] > 0 and not self.is_remote


class AdoptedRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's process that an earlier agent started and the new agent supervises."""

    rank: int
    attempt: int
    process: ProcessRecord
    process_tag: str  # `muster.contracts.settings.names.PROCESS_TAG` in it and in its children


class VramNeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU memory that each rank of a job needs, and what its host has."""

    vram_mb: int  # of one GPU, or of each that a rank has for itself
    wait_seconds: float  # for which a rank may wait for it
    usable_mb: dict[str, int]  # by GPU, as the cluster file names it


class AgentAssignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one agent."""

    job_uid: str
    host: str  # the coordinator's name for the host that it runs on
    agent_number: int
    token: str  # proves to the coordinator that it started this agent
    job_root: str  # the job's directory, see `muster.contracts.settings.paths.JobFiles`
    address_file: str  # of this host, see `worker.coordinator.link.AddressFile`
    coordinator: CoordinatorAddress | None = None
    """On another host, what its file says first. `host` is an IP address: the agent, which has one
    thread, must not wait for a name to be looked up."""
    is_managed: bool  # the ranks run a managed program, so they may be forked from a prefork server
    orphan_timeout_seconds: float
    """After this long without a coordinator, ranks are asked to save and exit."""
    stop_grace_seconds: float
    python: str | None = None  # interpreter of the job's ranks; None: that of the agent
    agent_heartbeat_seconds: float  # interval of `AgentHeartbeat`
    max_log_bytes: int  # see `muster.contracts.job.spec.JobSpec`
    spare_ranks: int = 0  # processes kept ready to become a rank
    gpus_per_rank: int = 0  # GPUs that each rank has for itself
    is_joined: bool = False
    """A scheduler has chosen the machine, where another agent of the job may run as well."""
    gpus_at_once: int = 0
    """GPUs, or shares of one, without which none starts: those of a gang, or of one rank."""
    vram: VramNeed | None = None
    secrets: dict[str, str] = {}
    """The job's references by variable name, see `muster.contracts.job.secrets`."""
    secrets_dir: str = ""  # the directory of ``file:`` references
    shared_env: dict[str, str] = {}
    """The values of the job's ``env:`` references by name, as far as the service shares them; on
    another host those of ``file:`` references as well, by the whole reference. They are in this
    message and in the environment of ranks only."""
    store_keys: dict[str, str] | None = None
    """Variables for the job's storage process alone; None for a job that needs none."""
    environment: dict[str, str] = {}
    """Variables of the agent and its ranks that the launcher sets, unless its own say otherwise."""
    checkpoint_dir: str | None = None
    """The directory of checkpoints, which this host may share with the coordinator's; None for an
    agent on that host, and for a job that saves in an object store."""
    sends_checkpoints: bool = False
    """This host does not share it: the storage process sends checkpoints to the coordinator."""
    needs: tuple[str, ...] = ()
    """Paths of the job; a node that lacks one of them starts no rank."""
    moves: Moves = ()
    """How paths of the job become those of this host, which may have another home directory."""
    adopted: tuple[AdoptedRank, ...] = ()
    """The job's processes that live on. Any other process of the job is ended first."""

    @property
    def has_storage(self) -> bool:
        """True if ranks save or read through a storage process."""
        return self.store_keys is not None or self.sends_checkpoints

    @property
    def is_remote(self) -> bool:
        """True for a host that is not the coordinator's: connections are sealed, logs sent."""
        return self.coordinator is not None


# What a coordinator sends to its fork server


class ForkAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Fork an agent; the descriptors of its standard input and its log travel with this."""

    job_uid: str
    has_prefork: bool  # it is to start with a prefork server of its own


# What an agent sends to its prefork server


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a forked rank; the descriptors of its log and channel travel with them."""

    environment: dict[str, str]
    working_dir: str


FORKED_PID: Final = struct.Struct("<q")  # the answer of both servers
