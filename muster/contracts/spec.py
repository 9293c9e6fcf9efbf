"""What a person asks for: the description of a job, its defaults and its limits.

One frozen value, the same over REST, in the database, on the wire and from the environment. Whether
it can be accepted is for `muster.contracts.spec_problems` to say.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from muster.contracts.batches import SAMPLES_PER_SHARD_MIN

JOB_ID_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
"""Safe as a directory name, an environment value and a URL part: no dot, no slash, no blank."""

RESERVED_IDS: Final = frozenset({"summaries", "purge"})
"""No job can be called like a path of the API beside the jobs."""

PROGRAM_WANTED: Final = "file.py:Name or package.module:Name"

ENVIRONMENT_NAME_PATTERN: Final = r"[A-Za-z_][A-Za-z0-9_]{0,127}"

TEXT_LIMIT: Final = 4096
"""Longest string anywhere in a spec: the longest path Linux takes."""

COMMAND_LIMIT: Final = 1024
"""Most words of a command."""

COMMAND_LIMIT_BYTES: Final = 100_000
"""Of all its words as JSON: they travel in one variable, and Linux takes no entry over 128 KiB."""

ENVIRONMENT_LIMIT_BYTES: Final = 500_000
"""Of `env` as JSON: with the command it fits into one frame to an agent."""

MAPPING_LIMIT: Final = 256
"""Most entries of `env` or `labels`."""

SECONDS_LIMIT: Final = 30 * 24 * 3600.0
"""A month. Longer waits are typing errors."""


Mode: TypeAlias = Literal["independent", "synchronous"]
"""Each rank has a model and shards of its own, or all ranks hold one model together."""

BackendChoice: TypeAlias = Literal["auto", "shared_memory", "tcp"]
"""How the ranks of a synchronous job talk; auto: shared memory where all are on one host."""

RestartScope: TypeAlias = Literal["rank", "gang"]
"""What is started again when a rank dies: that rank, or all ranks together. A gang is a program
whose process group cannot take in a newcomer, such as one of torch.distributed."""

INDEPENDENT_BATCH_SIZE: Final = 16
SYNCHRONOUS_BATCH_SIZE: Final = 64


GROUP_LIMIT: Final = 250
"""Most ranks of a synchronous job: their memory is handed over as descriptors, and the kernel takes
253 at once."""


class Range(msgspec.Struct, frozen=True):
    """Inclusive limits of a number."""

    low: float
    high: float


LIMITS: Final[Mapping[str, Range]] = {
    "world_size": Range(1, 4096),
    "min_workers": Range(1, 4096),
    "max_workers": Range(1, 4096),
    "epochs": Range(1, 1_000_000),
    "virtual_shards": Range(1, 4096),
    "batch_size": Range(1, 1_000_000),
    "replay_every": Range(1, 4096),
    "seed": Range(0, 2**63 - 1),
    "checkpoint_every": Range(1, 1_000_000_000),
    "keep_last": Range(1, 10_000),
    "sleep_sec": Range(0, 3600),
    "max_restarts": Range(0, 1_000_000),
    "max_hangs": Range(0, 1_000_000),
    "max_out_of_memory": Range(0, 1_000_000),
    "max_preemptions": Range(0, 1_000_000),
    "max_fruitless": Range(1, 1_000_000),
    "heartbeat_timeout": Range(1, SECONDS_LIMIT),
    "start_grace_seconds": Range(1, SECONDS_LIMIT),
    "stop_grace_seconds": Range(0, SECONDS_LIMIT),
    "progress_timeout_seconds": Range(1, SECONDS_LIMIT),
}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that was asked for. ``JobSpec()`` is a job of four ranks with all defaults."""

    name: str | None = None
    mode: Mode = "independent"
    world_size: int = 4
    min_workers: int = 1
    max_workers: int | None = None
    """None: the world size at the start."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int | None = None
    """Samples of a step; in independent mode those of one rank. None: `effective_batch_size`."""
    virtual_shards: int = 32
    """Equal parts of every batch of a synchronous job; a power of two. With the batch size it
    decides the bits of the result, which the number of ranks never does."""
    backend: BackendChoice = "auto"
    replay_every: int | None = None
    """One virtual shard in this many is computed by a second rank as well, and compared."""
    seed: int = 0
    checkpoint_every: int = 5
    """Steps between checkpoints."""
    keep_last: int = 3
    """Checkpoints kept per rank."""
    sleep_sec: float = 0.0
    """Pause after each step of a training of ours, for demonstrations."""
    dataset_dir: str | None = None
    """None: the default place, or a small synthetic data set where there is none."""
    checkpoint_dir: str | None = None
    """None: the server's default."""
    command: tuple[str, ...] | None = None
    """The argv every rank becomes. None: a training of ours, see `program`."""
    program: str | None = None
    """What a synchronous job trains: ``file.py:Name`` or ``package.module:Name``. None: the
    built-in classifier."""
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    """More of the environment, by reference: see `muster.contracts.secrets`."""
    working_dir: str | None = None
    heartbeat_timeout: float = 10.0
    """Seconds without a heartbeat after which a rank that beats is killed and replaced."""
    start_grace_seconds: float = 120.0
    """Seconds a rank may take from its start to its first sign of life."""
    stop_grace_seconds: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    progress_timeout_seconds: float | None = None
    """Seconds without a new step after which a beating rank is replaced. None: never."""
    restart_scope: RestartScope = "rank"
    """Of a gang only the rank that died first is counted, and its budgets decide."""
    max_restarts: int = 50
    """Restarts of one rank after a crash; one crash more fails the job. The classes of
    `muster.contracts.endings` have budgets of their own."""
    max_hangs: int = 20
    """Restarts of one rank that was killed because it hung."""
    max_out_of_memory: int = 5
    """Restarts of one rank that ran out of memory: it often does so again."""
    max_preemptions: int = 1000
    """Restarts of one rank that somebody else has asked to stop."""
    max_fruitless: int = 5
    """Ends of one rank in a row without a new checkpoint, after which the job fails. Counted are
    those that the program may be to blame for, so not a SIGKILL from outside."""
    resume_from: str | None = None
    """The id of the job whose checkpoints this one starts from; its own id to go on."""
    labels: dict[str, str] = {}

    @property
    def effective_batch_size(self) -> int:
        """The samples of a step: what was asked for, or what the mode makes of it."""
        if self.batch_size is not None:
            return self.batch_size
        if self.mode == "independent":
            return INDEPENDENT_BATCH_SIZE
        return max(SYNCHRONOUS_BATCH_SIZE, SAMPLES_PER_SHARD_MIN * self.virtual_shards)

    @property
    def effective_backend(self) -> str:
        """How ranks of this job talk: through shared memory, as they are on one host."""
        return "shared_memory" if self.backend == "auto" else self.backend

    @property
    def largest_world_size(self) -> int:
        """The most ranks the job may ever have; an independent one keeps its number."""
        if self.mode == "independent" or self.max_workers is None:
            return self.world_size
        return self.max_workers


def usual_mode(command: Sequence[str] | None) -> Mode:
    """Return the mode of a job that names none: a command is a program that we do not manage."""
    return "synchronous" if command is None else "independent"


def is_program(reference: str) -> bool:
    """Return whether `reference` has the form of `JobSpec.program`."""
    place, _, name = reference.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return name.isidentifier() and (is_module or place.endswith(".py"))
