"""The messages between rank, agent and coordinator: a closed union of frozen, tagged values.

A rank and its agent share an inherited socket pair; an agent and the coordinator share one TCP
connection. `muster.contracts.wire` encodes a message and puts it into a frame. An unknown tag or
field is an error, except in a hello: both ends run the same version and protocol. The tags and the
encoded field names are the wire format and stay when a Python name changes.
"""

import struct
from typing import Annotated, Final, TypeAlias

import msgspec

from muster.contracts.agent import LOOPBACK
from muster.contracts.interpreter import PROTOCOL, VERSION
from muster.contracts.job import Reason
from muster.contracts.rank import Count, Phase, ProcessRecord, RankProgress
from muster.contracts.series import Window


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="is"
):
    """Common shape: immutable, named fields only, tagged."""


NONCE_BYTES: Final = 16

METRICS_LIMIT: Final = 64
METRIC_NAME_LIMIT: Final = 128
"""Characters. All metrics of a step go into one heartbeat, which has to fit into one packet."""

SAVED_LIMIT: Final = 256
"""Most `Saved` messages kept to be repeated; each includes the epochs of those before it."""

ERROR_LIMIT: Final = 2000  # characters kept of an error that a program has written down


# Rank → agent


class Executing(_Message, frozen=True, tag="executing"):
    """The launcher is about to exec the user's program, which may or may not send heartbeats."""


class Hello(_Message, frozen=True, tag="hello"):
    """A program that uses `muster.Run` has joined; it sends heartbeats from now on."""

    version: str = VERSION  # of the program's Muster
    protocol: int = PROTOCOL
    python: str = ""  # its interpreter


class RankVersion(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="hello"):
    """What a `Hello` of any version says: the fields that it does not know are ignored."""

    version: str = ""
    protocol: int = 0  # before there were numbers
    python: str = ""


class Code(_Message, frozen=True, tag="code"):
    """Digests of the user's code that a rank, or its agent before the start, has met, by path."""

    files: dict[str, str]


class Heartbeat(_Message, frozen=True, omit_defaults=True, tag="heartbeat"):
    """The rank is alive. Sent at every interval, and earlier when there is news."""

    progress: RankProgress
    checkpoints_saved: Count  # durable checkpoints of this attempt
    stopping: bool  # the rank received SIGTERM: from now on exit code 0 means saved, not finished
    waiting: bool  # the rank waits for its peers, so a missing step is not its fault
    window: Window | None = None  # all values since the heartbeat before
    phase: Phase = Phase.TRAINING


class JoinedProcessEnded(_Message, frozen=True, tag="joined_process_ended"):
    """The process that said hello has ended, and the script that started it goes on.

    Sent by the agent. The rank is then like a program that never sends heartbeats.
    """


class Warned(_Message, frozen=True, tag="warned"):
    """A warning for the job's events; training continues."""

    message: str


class Orphaned(_Message, frozen=True, tag="orphaned"):
    """The rank has lost its supervisor and was asked to save and exit.

    Sent by the rank, or by its agent for a program that sends nothing itself.
    """

    by: str  # sender and reason; "itself (no agent for 300 s)"


class PermanentFailure(_Message, frozen=True, tag="permanent_failure", omit_defaults=True):
    """The rank is about to exit, and a restart would not help."""

    reason: Reason
    message: str
    is_of_data: bool = False  # on a host with the data of the job it would


class Raised(_Message, frozen=True, tag="raised"):
    """The program raised an error in this step, and the rank is about to exit.

    A step is deterministic, so the same error at the same step will come again.
    """

    step: Count
    message: str
    key: str = ""
    """Equal for errors that count as the same one in any step."""


class RestoreFailed(_Message, frozen=True, tag="restore_failed"):
    """The checkpoint from which the whole gang resumes is damaged in this rank's place."""

    restore_from: str
    message: str


class Ready(_Message, frozen=True, tag="ready"):
    """A rank of a synchronous job has loaded its program and data, and waits for a group."""

    port: int  # the TCP port for its peers; 0 with shared memory


SPARE_READY: Final = Ready(port=-1)
"""A spare process has loaded its program and data, and waits for an order."""


class JoinedGroup(_Message, frozen=True, tag="joined_group"):
    """The rank trains in this group round: it has the state that all members have."""

    round: Count
    step: Count


class LoopEnded(_Message, frozen=True, tag="loop_ended"):
    """The loop of the program is over and the last checkpoint durable; its script goes on.

    Sent by programs whose ranks train one model and may do more after it, such as an export.
    """

    exporter: Count  # the one rank on whose script the job waits; equal on all ranks


class PeerLost(_Message, frozen=True, omit_defaults=True, tag="peer_lost"):
    """The rank lost a peer, or never reached it, and waits for the next group round."""

    round: Count
    message: str
    unreachable: int | None = None  # the rank to which no connection came about


class StateMismatch(_Message, frozen=True, omit_defaults=True, tag="state_mismatch"):
    """Some members of the group hold, or compute, other bits than the rest."""

    round: Count
    workers: tuple[int, ...]
    message: str
    entries: tuple[str, ...] = ()
    """The first parts of the state that differ, by name; none if something else does."""


class EpochDone(_Message, frozen=True, tag="epoch_done"):
    """The samples consumed in one epoch, and the totals of the data set's index."""

    epoch: Count
    samples: Count
    hash_sum: int  # sums of the samples' hashes are modulo 2**64
    expected_samples: Count
    expected_hash_sum: int

    @property
    def exactly_once(self) -> bool | None:
        """Whether every sample was read exactly once; None while samples are missing."""
        if self.samples < self.expected_samples:
            return None
        return (self.samples, self.hash_sum) == (self.expected_samples, self.expected_hash_sum)


class Saved(_Message, frozen=True, tag="saved"):
    """A coordinated checkpoint is durable: no step up to this one can be lost."""

    generation: Count
    step: Count
    epoch: Count
    digest: str  # of state and position, in hexadecimal digits
    consumed: Count
    consumed_hash: int
    epochs: tuple[EpochDone, ...]
    """Finished epochs that are durable with it, oldest first. Epochs that do not fit into one
    message follow in further messages of the same step."""


RankMessage: TypeAlias = (
    Executing
    | Hello
    | Code
    | Heartbeat
    | JoinedProcessEnded
    | Warned
    | Orphaned
    | PermanentFailure
    | Raised
    | RestoreFailed
    | Ready
    | JoinedGroup
    | LoopEnded
    | PeerLost
    | StateMismatch
    | Saved
)


# Agent → rank


class GroupMember(_Message, frozen=True, omit_defaults=True, tag="group_member"):
    """One worker of a group. Its index in the group is its index in `WorkerGroup.members`."""

    worker_id: int
    rank: int
    host: str  # the coordinator's name for it
    port: int
    address: str = LOOPBACK  # where members on other hosts reach it


class WorkerGroup(_Message, frozen=True, omit_defaults=True, tag="worker_group"):
    """The workers that train together from now on. A rank that is not a member exits.

    File descriptors of shared memory travel with it. If all members are on one host, first the
    memory that all members write results to, made for this round alone, then each member's own
    arena in the order of `members`. Else the recipient's own arena alone.
    """

    round: int  # counts up with every change of the group
    token: str  # members prove with it that they belong to the group
    members: tuple[GroupMember, ...]
    paused: bool  # no step is taken until the next round
    save: bool = False  # a checkpoint was requested: save the present step before the next one
    exporter: int | None = None  # as members of an earlier group, which has ended, have been told


# Agent → coordinator


class AgentHello(_Message, frozen=True, tag="agent_hello"):
    """First frame of an agent: its identity, and the token that proves it."""

    job_uid: str
    host: str  # as its assignment names it
    generation: int
    token: str
    machine: str = ""  # `muster.host.processes.machine_id`
    boot_id: str = ""
    node: str = ""  # the name of its machine, for people
    address: str = ""  # of its end of the connection
    sends_checkpoints: bool = False  # see `AgentAssignment`
    version: str = VERSION
    protocol: int = PROTOCOL

    @property
    def machine_key(self) -> tuple[str, str]:
        """The machine that it runs on: an id may be copied with its image, a boot has its own."""
        return self.machine, self.boot_id


class _FirstFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    """Readable by every version: fields that it does not know are ignored."""

    job_uid: str
    host: str = ""


class AgentVersion(_FirstFrame, frozen=True, tag="agent_hello"):
    """What an `AgentHello` of any version says."""

    version: str = ""  # none before there were agents on other hosts
    protocol: int = 0


Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class KeyRequest(_FirstFrame, frozen=True, tag="key_request"):
    """First frame of an agent on another host, in clear; all but the answer to it is sealed."""

    generation: int
    nonce: Nonce


class JoinRequest(_FirstFrame, frozen=True, tag="join_request"):
    """First sealed frame of the process that becomes the parent of an agent (`worker.join`).

    The answer is a `muster.contracts.attach.LaunchAgent`, or why there is none.
    """

    generation: int
    token: str
    nonce: Nonce  # of this process: a token is good for one, however often it asks
    node: str  # the name of its machine, for people
    version: str = VERSION
    protocol: int = 0  # every process says its own


class LogHello(_FirstFrame, frozen=True, tag="log_hello"):
    """First sealed frame of the process that sends home the logs of a host's ranks.

    The rest of the conversation is in `muster.contracts.log_parts`.
    """

    generation: int
    token: str
    directory: tuple[int, int]
    """Inode and time of the job's `uid` file, by which a disk is noticed that both hosts share."""


class StoreHello(_FirstFrame, frozen=True, tag="store_hello"):
    """First sealed frame of a storage process that sends checkpoints (`StoreCall`)."""

    generation: int
    token: str


class RankSpawned(_Message, frozen=True, tag="rank_spawned"):
    """A process was started; the fields of its `ProcessRecord` identify it for ever."""

    rank: int
    attempt: int
    pid: int
    start_ticks: int
    boot_id: str
    node: str
    pid_namespace: int


class RankSaid(_Message, frozen=True, tag="rank_said"):
    """A message of a rank, forwarded unchanged."""

    rank: int
    attempt: int
    message: RankMessage


class RankExited(_Message, frozen=True, tag="rank_exited"):
    """A process has ended, or could not be started; its exit record is written already.

    At most one of `exit_code` and `signal` is set. Neither is set if the end was not observed,
    because the agent had died first, or if the process never started; such a rank runs again.
    """

    rank: int
    attempt: int
    exit_code: int | None
    signal: int | None
    last_lines: tuple[str, ...] = ()  # the end of its log
    out_of_memory: bool = False  # the kernel killed it for its memory, as far as the agent can tell
    unstarted: str | None = None
    """A verb phrase, set if its host lacked a process, a descriptor or memory for it: a later
    start may succeed. A start that can never succeed is a `PermanentFailure`."""
    is_waiting: bool = False
    """Too few GPUs of its host, or too little of their memory, are free, which is no failure,
    however often it repeats."""
    retry_after_seconds: float | None = None  # until the next start, if its agent has an opinion
    error: str | None = None
    """The error file of the program, as torch's `@record` writes it: a type and a message, at most
    `ERROR_LIMIT` characters."""
    error_at: float | None = None
    """When the first error in the end of its log was written, by the clock of its host."""


class RankDied(_Message, frozen=True, tag="rank_died"):
    """The process of a member has ended with an error or a signal; its peers go on without it.

    What it has started may still run. `RankExited` follows once that is gone.
    """

    rank: int
    attempt: int


class RankCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoints of one rank by name (`muster.checkpoints.manifest`), newest first."""

    intact: tuple[str, ...] = ()  # of one job, as far as their manifests tell
    damaged: tuple[str, ...] = ()  # their manifests are


class CheckpointsListed(_Message, frozen=True, tag="checkpoints_listed"):
    """The answer to `ListCheckpoints`: what each rank's place holds, in the order of ranks."""

    attempt: Count
    own: tuple[RankCheckpoints, ...] = ()
    inherited: tuple[RankCheckpoints, ...] = ()
    problem: str | None = None  # why they cannot be listed at the moment


class AgentHeartbeat(_Message, frozen=True, omit_defaults=True, tag="agent_heartbeat"):
    """The agent is alive and reads from its ranks: it does not cause the silence of a rank."""

    stopped: tuple[tuple[int, int], ...]
    """Rank and attempt of each process that is stopped (SIGSTOP) and never sent a heartbeat."""
    late_seconds: float = 0.0  # by how much the agent itself was late, if that is worth a word
    starved: tuple[tuple[int, int, float], ...] = ()
    """Rank and attempt of each process whose heartbeat is late, and for how many seconds since then
    it could have run but no processor was free for it."""


AgentMessage: TypeAlias = (
    AgentHello | RankSpawned | RankSaid | RankDied | RankExited | CheckpointsListed | AgentHeartbeat
)


# Coordinator → agent


class KeyAnswer(_Message, frozen=True, tag="key_answer"):
    """The coordinator's part of the keys, in clear (`muster.contracts.sealing.agent_cipher`)."""

    nonce: Nonce


class Welcome(_Message, frozen=True, tag="welcome"):
    """The coordinator's first frame, to every agent; `epoch` is that of its lease and only grows.

    An agent that is not expected any more is dismissed with the next frame.
    """

    epoch: int


class ListCheckpoints(_Message, frozen=True, tag="list_checkpoints"):
    """List what the ranks of a gang have saved: all of them resume from one checkpoint."""

    attempt: Count  # that is to start; repeated in the answer
    location: str  # of the job's checkpoints
    inherited: str | None  # of those of the job that it resumes from
    ranks: Count


class StartRank(_Message, frozen=True, tag="start_rank"):
    """Start this attempt with exactly this environment (on top of the agent's own)."""

    rank: int
    attempt: int
    environment: dict[str, str]
    working_dir: str
    script: tuple[str, str] | None = None  # path and digest, as far as the job's are known
    is_code_bound: bool = False  # with another script it is not started


class TerminateRank(_Message, frozen=True, tag="terminate_rank"):
    """Ask the process to save and exit (SIGTERM)."""

    rank: int
    attempt: int


class KillRank(_Message, frozen=True, tag="kill_rank"):
    """End the process and everything it started (SIGKILL)."""

    rank: int
    attempt: int


class InjectFault(_Message, frozen=True, tag="inject_fault"):
    """Send a signal to the processes of these attempts, if they run, as an accident would."""

    signal: int
    attempts: tuple[tuple[int, int], ...]  # rank and attempt
    agent: int | None = None  # the generation of the agent, if it ends as well with all its ranks


class AnnounceGroup(_Message, frozen=True, tag="announce_group"):
    """Send the group to every rank; the attempt numbers say which processes are meant."""

    group: WorkerGroup
    attempts: tuple[int, ...]  # the attempt of each member's rank


class Dismiss(_Message, frozen=True, tag="dismiss"):
    """The job is over: kill the remaining processes and exit."""


CoordinatorMessage: TypeAlias = (
    Welcome
    | ListCheckpoints
    | StartRank
    | TerminateRank
    | KillRank
    | InjectFault
    | AnnounceGroup
    | Dismiss
)


# What an agent reads from its standard input, which other users of the machine cannot read


class CoordinatorAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address where a coordinator accepts agents."""

    host: str
    port: int
    number: tuple[int, int] = (0, 0)
    """Of the port that SSH forwards: the coordinator's epoch, and which connection it is."""


class AdoptedRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's process that an earlier agent started and the new agent supervises."""

    rank: int
    attempt: int
    process: ProcessRecord
    process_tag: str  # `muster.contracts.environ.PROCESS_TAG` in it and in its children


class VramNeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU memory that each rank of a job needs, and what its host has."""

    vram_mb: int  # of one GPU, or of each that a rank has for itself
    wait_seconds: float  # for which a rank may wait for it
    usable_mb: dict[str, int]  # by GPU, as the description of the cluster names it


class AgentAssignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one agent."""

    job_uid: str
    host: str  # the coordinator's name for the host that it runs on
    generation: int
    token: str  # proves to the coordinator that it started this agent
    job_root: str  # the job's directory, see `muster.contracts.paths.JobFiles`
    address_file: str  # holds a `CoordinatorAddress`; read again at every attempt to connect
    coordinators: tuple[CoordinatorAddress, ...] = ()
    """Tried in turn, with sealed connections, instead of that in the file. Each `host` is an IP
    address: the agent, which has one thread, must not wait for a name to be looked up."""
    is_forwarded: bool = False
    """The file names a port of this host that SSH forwards, which is sealed as well."""
    is_managed: bool  # the ranks run a managed program, so they may be forked from a prefork server
    orphan_timeout_seconds: float
    """After this long without a coordinator, ranks are asked to save and exit."""
    stop_grace_seconds: float
    python: str | None = None  # interpreter of the job's ranks; None: that of the agent
    agent_heartbeat_seconds: float  # interval of `AgentHeartbeat`
    max_log_bytes: int  # see `muster.contracts.spec.JobSpec`
    spare_ranks: int = 0  # processes kept ready to become a rank
    gpus_per_rank: int = 0  # GPUs that each rank has for itself
    is_joined: bool = False
    """A scheduler has chosen the machine, where another agent of the job may run as well."""
    gpus_at_once: int = 0
    """GPUs, or shares of one, without which none starts: those of a gang, or of one rank."""
    vram: VramNeed | None = None
    secrets: dict[str, str] = {}
    """The job's references by variable name, see `muster.contracts.secrets`."""
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
    adopted: tuple[AdoptedRank, ...] = ()
    """The job's processes that live on. Any other process of the job is ended first."""

    @property
    def has_storage(self) -> bool:
        """True if ranks save or read through a storage process."""
        return self.store_keys is not None or self.sends_checkpoints

    @property
    def is_remote(self) -> bool:
        """True for a host that is not the coordinator's: connections are sealed, logs sent home."""
        return self.is_forwarded or bool(self.coordinators)


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
