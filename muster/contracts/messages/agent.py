"""The messages between an agent, or another process of its host, and the coordinator."""

from typing import Annotated, TypeAlias

import msgspec

from muster.contracts.interpreter import PROTOCOL, VERSION
from muster.contracts.messages.message import Message
from muster.contracts.messages.rank import NONCE_BYTES, RankMessage, WorkerGroup
from muster.contracts.rank import Count

# Agent → coordinator


class AgentHello(Message, frozen=True, tag="agent_hello"):
    """First frame of an agent once both ends have proved themselves.

    The coordinator keeps only the digest of the token: a process that has read it is refused here.
    """

    job_uid: str
    host: str  # as its assignment names it
    agent_number: int
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


class _Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    """Readable by every version: fields that it does not know are ignored."""


class _FirstFrame(_Hello, frozen=True, kw_only=True):
    job_uid: str
    host: str = ""


class AgentVersion(_FirstFrame, frozen=True, tag="agent_hello"):
    """What an `AgentHello` of any version says."""

    version: str = ""  # none before there were agents on other hosts
    protocol: int = 0


Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class AgentClaim(_FirstFrame, frozen=True, tag="agent_claim"):
    """Which agent a process belongs to: what a link says before anything is proved.

    The process proves it by the agent's token. All that follows from another host is sealed.
    """

    agent_number: int


class JoinRequest(_FirstFrame, frozen=True, tag="join_request"):
    """First sealed frame of the process that becomes the parent of an agent (`worker.join`).

    The answer is a `muster.contracts.messages.attach.LaunchAgent`, or why there is none.
    """

    agent_number: int
    token: str
    nonce: Nonce  # of this process: a token is good for one, however often it asks
    node: str  # the name of its machine, for people
    version: str = VERSION
    protocol: int = 0  # every process says its own


class LogHello(_Hello, frozen=True, tag="log_hello"):
    """First payload of the process that sends the logs of a host's ranks to the coordinator.

    The rest of the conversation is in `muster.contracts.messages.logs`.
    """

    directory: tuple[int, int]
    """Inode and time of the job's `uid` file, by which a disk is noticed that both hosts share."""


class StoreHello(_Hello, frozen=True, tag="store_hello"):
    """First payload of a storage process that sends checkpoints (`StoreCall`)."""


class _OfAttempt(Message, frozen=True):
    """About, or for, one process of a rank."""

    rank: int
    attempt: int


class RankSpawned(_OfAttempt, frozen=True, tag="rank_spawned"):
    """A process was started; the fields of its `ProcessRecord` identify it for ever."""

    pid: int
    start_ticks: int
    boot_id: str
    node: str
    pid_namespace: int


class RankSaid(_OfAttempt, frozen=True, tag="rank_said"):
    """A message of a rank, forwarded unchanged."""

    message: RankMessage


class RankExited(_OfAttempt, frozen=True, tag="rank_exited"):
    """A process has ended, or could not be started; its exit record is written already.

    At most one of `exit_code` and `signal` is set. Neither is set if the end was not observed,
    because the agent had died first, or if the process never started; such a rank runs again.
    """

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


class RankDied(_OfAttempt, frozen=True, tag="rank_died"):
    """The process of a member has ended with an error or a signal; its peers go on without it.

    What it has started may still run. `RankExited` follows once that is gone.
    """


class RankCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoints of one rank by name (`muster.checkpoints.manifest`), newest first."""

    intact: tuple[str, ...] = ()  # of one job, as far as their manifests tell
    damaged: tuple[str, ...] = ()  # their manifests are


class CheckpointsListed(Message, frozen=True, tag="checkpoints_listed"):
    """The answer to `ListCheckpoints`: what each rank's place holds, in the order of ranks."""

    attempt: Count
    own: tuple[RankCheckpoints, ...] = ()
    inherited: tuple[RankCheckpoints, ...] = ()
    problem: str | None = None  # why they cannot be listed at the moment


class AgentHeartbeat(Message, frozen=True, omit_defaults=True, tag="agent_heartbeat"):
    """The agent is alive and reads from its ranks: it does not cause the silence of a rank."""

    stopped: tuple[tuple[int, int], ...]
    """Rank and attempt of each process that is stopped (SIGSTOP) and never sent a heartbeat."""
    sent_at: float = 0.0  # `muster.host.processes.since_boot` of its host; repeated in the answer
    late_seconds: float = 0.0  # by how much the agent itself was late, if that is worth a word
    starved: tuple[tuple[int, int, float], ...] = ()
    """Rank and attempt of each process whose heartbeat is late, and for how many seconds since then
    it could have run but no processor was free for it."""


AgentMessage: TypeAlias = (
    AgentHello | RankSpawned | RankSaid | RankDied | RankExited | CheckpointsListed | AgentHeartbeat
)


# Coordinator → agent


class Welcome(Message, frozen=True, tag="welcome"):
    """The coordinator's first frame, to every agent; `epoch` is that of its lease and only grows.

    An agent that is not expected any more is dismissed with the next frame.
    """

    epoch: int


class HeartbeatHeard(Message, frozen=True, tag="heartbeat_heard"):
    """The answer to an `AgentHeartbeat` from another host, whose lease begins when it was sent."""

    sent_at: float


class ListCheckpoints(Message, frozen=True, tag="list_checkpoints"):
    """List what the ranks of a gang have saved: all of them resume from one checkpoint."""

    attempt: Count  # that is to start; repeated in the answer
    location: str  # of the job's checkpoints
    inherited: str | None  # of those of the job that it resumes from
    ranks: Count


class StartRank(_OfAttempt, frozen=True, tag="start_rank"):
    """Start this attempt with exactly this environment (on top of the agent's own)."""

    environment: dict[str, str]
    working_dir: str
    script: tuple[str, str] | None = None  # path and digest, as far as the job's are known
    is_code_bound: bool = False  # with another script it is not started


class TerminateRank(_OfAttempt, frozen=True, tag="terminate_rank"):
    """Ask the process to save and exit (SIGTERM)."""


class KillRank(_OfAttempt, frozen=True, tag="kill_rank"):
    """End the process and everything it started (SIGKILL)."""


class InjectFault(Message, frozen=True, tag="inject_fault"):
    """Send a signal to the processes of these attempts, if they run, as an accident would."""

    signal: int
    attempts: tuple[tuple[int, int], ...]  # rank and attempt
    agent: int | None = None  # the agent's number, if it ends as well with all its ranks


class AnnounceGroup(Message, frozen=True, tag="announce_group"):
    """Send the group to every rank; the attempt numbers say which processes are meant."""

    group: WorkerGroup
    attempts: tuple[int, ...]  # the attempt of each member's rank


class Dismiss(Message, frozen=True, tag="dismiss"):
    """The job is over: kill the remaining processes and exit."""


CoordinatorMessage: TypeAlias = (
    Welcome
    | HeartbeatHeard
    | ListCheckpoints
    | StartRank
    | TerminateRank
    | KillRank
    | InjectFault
    | AnnounceGroup
    | Dismiss
)
