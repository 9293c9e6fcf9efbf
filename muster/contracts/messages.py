"""What processes say to each other: a closed union of frozen, tagged values per direction.

Rank ↔ agent over an inherited socket pair, agent ↔ coordinator over one TCP connection. A frame
(`muster.contracts.framing`) carries one message, encoded (`muster.contracts.encoding`) with its
tag. An unknown tag or field is an error: both ends are of one version.
"""

from typing import Annotated, Final, TypeAlias

import msgspec

from muster.contracts.job import Reason


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="is"
):
    """Common shape: immutable, named fields only, tagged."""


COUNT_MAX: Final = 2**63 - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
"""What a rank counts, within what every database can hold: a program may say anything."""


METRICS_LIMIT: Final = 64
METRIC_NAME_LIMIT: Final = 128
"""Characters. All metrics of a step go into one beat, which has to fit into one packet."""


# Rank → agent


class Executing(_Message, frozen=True, tag="executing"):
    """The launcher is about to become the user's program; whether that beats is not known."""


class Hello(_Message, frozen=True, tag="hello"):
    """A program that uses our handle has joined; from now on it beats."""


class Beat(_Message, frozen=True, tag="beat"):
    """The rank is alive and here. Sent every heartbeat, and earlier when there is news."""

    step: Count
    total_steps: Count | None
    epoch: Count
    shard_idx: Count
    line_idx: Count
    loss: float | None
    """The last loss the program gave; None before the first, and for a NaN or an infinity."""
    metrics: dict[str, float]
    """Whatever else the program gave with its last step; finite numbers only."""
    checkpoints_saved: Count
    """Durable checkpoints of this incarnation."""
    last_checkpoint_step: Count | None
    stopping: bool
    """It was asked to stop (SIGTERM, by whomever): exit code 0 now means saved, not done."""
    waiting: bool
    """It is not at work itself but waits for others: that no step is taken is not its fault."""


class Warned(_Message, frozen=True, tag="warned"):
    """Something a person should see in the job's events; training goes on."""

    message: str


class Orphaned(_Message, frozen=True, tag="orphaned"):
    """We asked the rank ourselves to save and exit, as nobody looked after it any more.

    Said by the rank or, of one that does not speak for itself, by its agent.
    """

    by: str
    """Who asked, and why; "itself (no agent for 300 s)"."""


class Refused(_Message, frozen=True, tag="refused"):
    """The rank is about to exit and starting it again would not help."""

    reason: Reason
    message: str


class Raised(_Message, frozen=True, tag="raised"):
    """The program raised an error in this step, and the rank is about to exit.

    What the program computes is a function of the step: the same error again is no accident.
    """

    step: Count
    message: str


class Ready(_Message, frozen=True, tag="ready"):
    """A rank of a synchronous job has its program and its data, and waits for a layout."""

    port: int
    """Where its peers reach it over TCP; 0 where they share memory."""


class TookUp(_Message, frozen=True, tag="took_up"):
    """The layout is in force for this rank: it has the state that all members have."""

    generation: Count
    step: Count


class Stranded(_Message, frozen=True, tag="stranded"):
    """A rank has lost a peer, or never found it, and waits for another layout."""

    generation: Count
    message: str


class Disputed(_Message, frozen=True, tag="disputed"):
    """Members of the layout differ from the others in what they hold, or compute."""

    generation: Count
    workers: tuple[int, ...]
    message: str


class EpochDone(_Message, frozen=True, tag="epoch_done"):
    """What was consumed in one whole pass, and what the data set's index says of it."""

    epoch: Count
    samples: Count
    hash_sum: int
    expected_samples: Count
    expected_hash_sum: int


SAVED_LIMIT: Final = 256
"""Most messages about checkpoints that are kept to be said again; each tells of the passes of
those before it, too."""


class Saved(_Message, frozen=True, tag="saved"):
    """A coordinated checkpoint is durable: nothing up to this step can be lost any more."""

    generation: Count
    step: Count
    epoch: Count
    digest: str
    """Of state and position, in hexadecimal digits."""
    consumed: Count
    consumed_hash: int
    epochs: tuple[EpochDone, ...]
    """Passes that are over and durable with it, the oldest first. Those that do not fit into one
    message are told in further ones, of the same step."""


RankMessage: TypeAlias = (
    Executing
    | Hello
    | Beat
    | Warned
    | Orphaned
    | Refused
    | Raised
    | Ready
    | TookUp
    | Stranded
    | Disputed
    | Saved
)


# Agent → rank


class Seat(_Message, frozen=True, tag="seat"):
    """One member of a layout. Its place in the group is its place in the list."""

    worker_id: int
    rank: int
    host: str
    port: int


class Layout(_Message, frozen=True, tag="layout"):
    """Who trains together from now on. It goes along with descriptors of shared memory.

    First the memory that all members write results to, made for this layout alone, then each
    member's own arena in the order of `seats`. Who is not among them leaves.
    """

    generation: int
    token: str
    """What members prove to each other that they are."""
    seats: tuple[Seat, ...]
    paused: bool
    """Nobody takes a step until the next layout."""


# Agent → coordinator


class AgentHello(_Message, frozen=True, tag="agent_hello"):
    """First frame of an agent: who it is, and the token that proves it."""

    job_uid: str
    generation: int
    token: str


class RankSpawned(_Message, frozen=True, tag="rank_spawned"):
    """A process exists; (pid, start_ticks) with the boot id name it for ever."""

    rank: int
    incarnation: int
    pid: int
    start_ticks: int
    boot_id: str
    node: str


class RankSaid(_Message, frozen=True, tag="rank_said"):
    """A message of a rank, passed on unchanged."""

    rank: int
    incarnation: int
    message: RankMessage


ERROR_LIMIT: Final = 2000
"""Characters of an error that a program has written down."""


class RankExited(_Message, frozen=True, tag="rank_exited"):
    """A process has ended, or could not be started; its exit record is durable already.

    At most one of `exit_code` and `signal` is set; neither for an end that nobody saw, because the
    rank's agent had died before it, or of a process that never was: who cannot know that it was
    done has to run it once more.
    `last_lines` is the end of its log.
    """

    rank: int
    incarnation: int
    exit_code: int | None
    signal: int | None
    last_lines: tuple[str, ...]
    out_of_memory: bool = False
    """The kernel killed it for its memory, as far as that can be known."""
    unstarted: str | None = None
    """Why it never became a process, a verb phrase, if it may become one later: its host had no
    process, descriptor or room to give. What can never be started is `Refused`."""
    error: str | None = None
    """What it has written down itself of its error, as torch's `@record` does: a type and words,
    `ERROR_LIMIT` characters at most."""


class Pulse(_Message, frozen=True, tag="pulse"):
    """The agent is there and hears its ranks: while it says so, their silence is their own."""

    stopped: tuple[tuple[int, int], ...]
    """Rank and incarnation of those that stand still (SIGSTOP) and were never heard to beat."""


AgentMessage: TypeAlias = AgentHello | RankSpawned | RankSaid | RankExited | Pulse


# Coordinator → agent


class Welcome(_Message, frozen=True, tag="welcome"):
    """The coordinator's first frame, to every agent. `epoch` is that of its lease: it only goes up.

    One that is not expected any more is dismissed in the next.
    """

    epoch: int


class StartRank(_Message, frozen=True, tag="start_rank"):
    """Start this incarnation with exactly this environment (on top of the agent's own)."""

    rank: int
    incarnation: int
    environment: dict[str, str]
    working_dir: str


class TerminateRank(_Message, frozen=True, tag="terminate_rank"):
    """Ask the process to save and exit (SIGTERM)."""

    rank: int
    incarnation: int


class KillRank(_Message, frozen=True, tag="kill_rank"):
    """End the process and everything it started (SIGKILL)."""

    rank: int
    incarnation: int


class Announce(_Message, frozen=True, tag="announce"):
    """Tell every rank the layout; incarnations say which processes are meant."""

    layout: Layout
    incarnations: tuple[int, ...]
    """Of each seat's rank."""


class Dismiss(_Message, frozen=True, tag="dismiss"):
    """The job is over: kill what is left and exit."""


CoordinatorMessage: TypeAlias = Welcome | StartRank | TerminateRank | KillRank | Announce | Dismiss
