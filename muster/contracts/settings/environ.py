"""The environment variables of Muster, each declared once: name, type, limits, default, meaning.

Three families: the public names that configure a worker or coordinator started by hand, the names
that torchrun gives to a rank, and our own with the prefix ``MUSTER_``. `rank_environment` writes
what `RankSettings.read` reads. An empty variable counts as unset.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    get_type_hints,
)

import msgspec

from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job.field_types import (
    COMPRESSION_WANTED,
    JOB_ID_PATTERN,
    PROGRAM_WANTED,
    RESUME_PATTERN,
    RESUME_WANTED,
    SAMPLES_PER_SHARD_MIN,
    BackendChoice,
    Bits,
    CheckpointEvery,
    KeepBest,
    Mode,
    fits_shards,
    is_compression,
    is_power_of_two,
    is_program,
)
from muster.contracts.job.limits import LIMITS
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.contracts.location import (
    Location,
    save_lead,
)
from muster.contracts.settings.names import (
    AGENT_FD,
    AGENT_SOCKET,
    CHECK_KILLS,
    CHECK_STEPS,
    HOST_COUNT,
    ONE_HOST_DEFAULTS,
    PROCESS_TAG,
    RANK_DEFAULTS,
    RESTORE_FROM,
    SENDS_CHECKPOINTS,
    SPARE,
    STORAGE_SOCKET,
)
from muster.contracts.settings.variables import (
    INTEGER_MAX,
    ORPHAN_VARIABLE,
    RANK_PORTS,
    SECONDS_LIMIT,
    Variable,
    read_fields,
)

HEARTBEAT_SECONDS: Final = 2.0
AGENT_HEARTBEAT_SECONDS: Final = 1.0
"""An agent reports for all of its ranks, so it reports more often."""

HEARTBEATS_PER_TIMEOUT: Final = 5
"""A short timeout shortens the heartbeat interval, so that one late heartbeat is no failure."""

ORPHAN_TIMEOUT_SECONDS: Final = 120.0

JOB_VARIABLES: Final[Mapping[str, str]] = {
    "world_size": "WORLD_SIZE",
    "checkpoint_dir": "CHECKPOINT_DIR",
    "checkpoint_every": "CHECKPOINT_EVERY",
    "keep_last": "MUSTER_KEEP_LAST",
    "dataset_dir": "DATASET_DIR",
    "sleep_sec": "SLEEP_SEC",
    "heartbeat_timeout": "HEARTBEAT_TIMEOUT",
    "max_restarts": "MAX_RESTARTS",
    "epochs": "MUSTER_EPOCHS",
    "batch_size": "MUSTER_BATCH_SIZE",
    "seed": "MUSTER_SEED",
    "command": "MUSTER_COMMAND",
    "restart_scope": "MUSTER_RESTART_SCOPE",
    "mode": "MUSTER_MODE",
    "program": "MUSTER_PROGRAM",
    "virtual_shards": "MUSTER_VIRTUAL_SHARDS",
    "compression": "MUSTER_COMPRESSION",
    "compression_groups": "MUSTER_COMPRESSION_GROUPS",
    "backend": "MUSTER_BACKEND",
    "replay_every": "MUSTER_REPLAY_EVERY",
    "bits": "MUSTER_BITS",
    "resume_from": "MUSTER_RESUME_FROM",
    "keep_best": "MUSTER_KEEP_BEST",
}
"""The variables of job fields. `JobSpec` declares their types, limits, defaults and meanings."""

_NOT_BY_HAND: Final = frozenset({"keep_last", "keep_best", "resume_from"})
"""Written for ranks, but not read for a coordinator started by hand."""

_NOT_FOR_RANKS: Final = frozenset({"checkpoint_dir", "dataset_dir", "restart_scope"})
"""Not written for ranks, or not as they are in the spec."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one rank, which a user or an agent put into its environment."""

    job_id: Annotated[str, Variable("JOB_ID")]
    job_uid: Annotated[str | None, Variable("MUSTER_JOB_UID")] = None
    """None when started by hand: then it owns every checkpoint under this id."""
    rank: Annotated[int, Variable("RANK", "", 0, 4095)] = 0
    restart_count: Annotated[int, Variable("TORCHELASTIC_RESTART_COUNT", "", 0, INTEGER_MAX)] = 0
    generation: Annotated[int | None, Variable("MUSTER_GENERATION", "", 0, INTEGER_MAX)] = None
    """The fencing token: a commit below the newest checkpoint's generation is refused. None when
    started by hand: one above the newest."""
    restore_from: Annotated[str | None, Variable(RESTORE_FROM)] = None
    """Text of the `RestorePoint` from which a rank of a gang resumes. None: its own newest one."""
    heartbeat_seconds: Annotated[
        float, Variable("MUSTER_HEARTBEAT_SECONDS", "", 0.001, SECONDS_LIMIT)
    ] = HEARTBEAT_SECONDS
    agent_fd: Annotated[int | None, Variable(AGENT_FD, "", 0, INTEGER_MAX)] = None
    """The inherited socket to the agent. None: the process has no agent."""
    agent_socket: Annotated[Path | None, Variable(AGENT_SOCKET)] = None
    """Where the next agent listens after a takeover."""
    storage_socket: Annotated[Path | None, Variable(STORAGE_SOCKET)] = None
    """Where the job's storage process listens. None: the rank talks to the store itself."""
    sends_checkpoints: Annotated[bool, Variable(SENDS_CHECKPOINTS)] = False
    """`checkpoint_dir` is a directory of the coordinator's host, which this one does not share:
    the storage process sends checkpoints there."""
    orphan_timeout_seconds: Annotated[float, ORPHAN_VARIABLE] = ORPHAN_TIMEOUT_SECONDS
    host_count: Annotated[int, Variable(HOST_COUNT, "", 1, INTEGER_MAX)] = 1
    """On how many hosts the job may have ranks."""
    rank_ports: Annotated[range | None, RANK_PORTS] = None
    """None: any free port."""
    is_spare: Annotated[bool, Variable(SPARE)] = False
    check_steps: Annotated[int | None, Variable(CHECK_STEPS, "", 1, INTEGER_MAX)] = None
    """The process ends after this step; of `muster check`."""
    is_killed_in_check: Annotated[bool, Variable(CHECK_KILLS)] = False
    """The first attempt of rank 1 kills itself in the second step."""
    checkpoint_dir: Annotated[Location, Variable("CHECKPOINT_DIR")]
    dataset_dir: Annotated[Location, Variable("DATASET_DIR")]

    # From `JOB_VARIABLES`
    world_size: int
    checkpoint_every: CheckpointEvery
    keep_last: int
    sleep_sec: float
    epochs: int
    batch_size: int
    seed: int
    resume_from: str | None
    keep_best: KeepBest | None
    command: tuple[str, ...] | None
    mode: Mode
    program: str | None
    virtual_shards: int
    compression: str | None
    """The kind, or ``random:RATIO``."""
    compression_groups: int | None
    """None without compression."""
    backend: BackendChoice
    replay_every: int | None
    bits: Bits

    @classmethod
    def read(
        cls, environ: Mapping[str, str], *, world_size: int, job_id: str = "local"
    ) -> "RankSettings":
        """Read a rank's settings.

        `world_size` and `job_id` are the defaults: 4 for a rank started by hand, 1 and its own
        name for a script that runs alone.
        """
        own = {"job_id": job_id, **read_fields(cls, environ)}
        if not re.fullmatch(JOB_ID_PATTERN, own["job_id"]):
            wanted = "a job id: letters, digits, '-' and '_'"
            raise InvalidEnvironment("JOB_ID", own["job_id"], wanted)
        job = {"world_size": world_size, **_read_job(environ)}
        spec = _checked(JobSpec(**job))
        if own.get("rank", 0) >= spec.world_size:
            raise InvalidEnvironment("RANK", environ["RANK"], f"in [0, {spec.world_size})")
        fields = {
            field: getattr(spec, field)
            for field in cls.__struct_fields__
            if field in JOB_VARIABLES and field not in _NOT_FOR_RANKS
        }
        fields |= {
            "batch_size": spec.effective_batch_size,
            "compression_groups": spec.effective_compression_groups,
        }
        return cls(**own, **fields)


class HostPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a rank on its host, and of that among the hosts of its job."""

    local_rank: int
    local_world_size: int
    group_rank: int = 0  # of its host, among those that have ranks
    group_world_size: int = 1  # how many hosts have ranks
    host_count: int = 1  # how many may have
    master_address: str = LOOPBACK  # of the host of rank 0


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt of one rank is given beside the spec of its job."""

    job_id: str
    job_uid: str
    rank: int
    attempt: int
    checkpoint_dir: Location
    dataset_dir: Location
    master_port: int
    generation: int
    """Fencing token of its checkpoints. It is equal for all ranks of a gang, so that the name of a
    checkpoint says which ones were saved together."""
    restore_from: str | None = None
    place: HostPlace | None = None  # None: all ranks are on one host


def spec_from_environment(environ: Mapping[str, str]) -> JobSpec:
    """Return the job that the public names describe, for a coordinator started by hand."""
    found = _read_job(environ)
    fields = {field: value for field, value in found.items() if field not in _NOT_BY_HAND}
    return _checked(JobRequest(**fields).spec())


def rank_environment(spec: JobSpec, assignment: Assignment) -> dict[str, str]:
    """Return every variable of a supervised rank; the job's own `env` cannot replace ours.

    The torchrun names let an unmodified script find its place.
    """
    rank, attempt = str(assignment.rank), str(assignment.attempt)
    place = assignment.place or HostPlace(
        local_rank=assignment.rank, local_world_size=spec.world_size
    )
    job = msgspec.structs.asdict(spec) | {"batch_size": spec.effective_batch_size}
    job |= dict.fromkeys(spec.left_to_script)
    if spec.restart_scope == "gang":
        lead = save_lead(assignment.checkpoint_dir, place.host_count)
        job["keep_last"] = max(spec.keep_last, 1 + lead)
    if spec.command:
        job["command"] = msgspec.json.encode(spec.command).decode()
    if spec.keep_best:
        job["keep_best"] = msgspec.json.encode(spec.keep_best).decode()
    heartbeat = min(HEARTBEAT_SECONDS, spec.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT)
    return {
        **RANK_DEFAULTS,
        **(ONE_HOST_DEFAULTS if place.host_count == 1 else {}),
        **spec.env,
        # Written even when empty, so that a rank does not read the service's own variables.
        **{
            name: "" if job[field] is None else str(job[field])
            for field, name in JOB_VARIABLES.items()
            if field not in _NOT_FOR_RANKS
        },
        "JOB_ID": assignment.job_id,
        "RANK": rank,
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "NODE_RANK": str(place.group_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RUN_ID": assignment.job_id,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Without it torch's gloo rendezvous reads the stale keys of the group that died.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CHECKPOINT_DIR": str(assignment.checkpoint_dir),
        "DATASET_DIR": str(assignment.dataset_dir),
        "MUSTER_HEARTBEAT_SECONDS": str(heartbeat),
        "MUSTER_JOB_UID": assignment.job_uid,
        "MUSTER_GENERATION": str(assignment.generation),
        HOST_COUNT: str(place.host_count),
        RESTORE_FROM: assignment.restore_from or "",
        PROCESS_TAG: process_tag(assignment.job_uid, assignment.rank, assignment.attempt),
    }


LATE_PULSES: Final = 2.25
"""Heartbeats of an agent after which its next one is late, and that of a rank, which sends one for
two of them."""


def agent_heartbeat_seconds(spec: JobSpec) -> float:
    """Return the interval of an agent's own heartbeats."""
    return min(AGENT_HEARTBEAT_SECONDS, spec.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT)


def process_tag(job_uid: str, rank: int, attempt: int) -> str:
    """Return the value of `PROCESS_TAG` for one attempt of one rank."""
    return f"{job_uid}/{rank}/{attempt}"


def _read_job(environ: Mapping[str, str]) -> dict[str, Any]:
    hints = get_type_hints(JobSpec, include_extras=True)
    found = {}
    name = JOB_VARIABLES["compression"]  # before it is converted, which would not say what it means
    if (text := environ.get(name)) and not is_compression(text):
        raise InvalidEnvironment(name, text, COMPRESSION_WANTED.removeprefix("use "))
    for field, name in JOB_VARIABLES.items():
        if text := environ.get(name):
            limits = msgspec.structs.astuple(LIMITS[field]) if field in LIMITS else (None, None)
            found[field] = Variable(name, "", *limits).parse(text, hints[field])
    if not re.fullmatch(RESUME_PATTERN, found.get("resume_from", "a")):
        raise InvalidEnvironment("MUSTER_RESUME_FROM", found["resume_from"], RESUME_WANTED)
    if not is_program(found.get("program", "a:b")):
        raise InvalidEnvironment("MUSTER_PROGRAM", found["program"], PROGRAM_WANTED)
    return found


def _checked(spec: JobSpec) -> JobSpec:
    """Return `spec`, or raise `InvalidEnvironment` if its batch cannot be cut into shards."""
    shards, size = spec.virtual_shards, spec.effective_batch_size
    if not is_power_of_two(shards):
        raise InvalidEnvironment("MUSTER_VIRTUAL_SHARDS", str(shards), "a power of two")
    groups = spec.effective_compression_groups or 1
    if not is_power_of_two(groups) or groups > shards:
        wanted = f"a power of two up to {shards}"
        raise InvalidEnvironment("MUSTER_COMPRESSION_GROUPS", str(groups), wanted)
    if spec.mode == "synchronous" and not fits_shards(size, shards):
        wanted = f"a multiple of {shards}, {SAMPLES_PER_SHARD_MIN * shards} or more"
        raise InvalidEnvironment("MUSTER_BATCH_SIZE", str(size), wanted)
    return spec
