"""The environment variables of Muster, each declared once: name, type, limits, default, meaning.

Three families: the public names that configure a worker or coordinator started by hand, the names
that torchrun gives to a rank, and our own with the prefix ``MUSTER_``. `rank_environment` writes
what `RankSettings.read` reads. An empty variable counts as unset.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job.spec import (
    JOB_ID_PATTERN,
    LIMITS,
    PROGRAM_WANTED,
    RESUME_PATTERN,
    RESUME_WANTED,
    SAMPLES_PER_SHARD_MIN,
    BackendChoice,
    Bits,
    CheckpointEvery,
    JobRequest,
    JobSpec,
    KeepBest,
    Mode,
    fits_shards,
    is_power_of_two,
    is_program,
)
from muster.contracts.location import (
    SCHEME,
    InvalidLocation,
    Location,
    expand_home,
    parse_location,
    save_lead,
)

_DIRECTORIES: Final[Mapping[str, str]] = {
    "CHECKPOINT_DIR": "checkpoints",
    "DATASET_DIR": "data/shards",
}
"""The defaults, below the current directory."""

INTEGER_MAX: Final = 2**63 - 1
SECONDS_LIMIT: Final = 1e9

HEARTBEAT_SECONDS: Final = 2.0
AGENT_HEARTBEAT_SECONDS: Final = 1.0
"""An agent reports for all of its ranks, so it reports more often."""

HEARTBEATS_PER_TIMEOUT: Final = 5
"""A short timeout shortens the heartbeat interval, so that one late heartbeat is no failure."""

ORPHAN_TIMEOUT: Final = "MUSTER_ORPHAN_TIMEOUT"
ORPHAN_TIMEOUT_SECONDS: Final = 120.0

PROCESS_TAG_WIDTH: Final = 64
"""A prefork server overwrites process tags in place, so each has this width: a uid of 32 digits,
a rank of 4, an attempt, and room to spare."""

PROCESS_TAG: Final = "MUSTER_PROCESS_TAG"
"""Holds job uid, rank and attempt in every process that a rank starts, so that Muster recognizes
the processes that a rank leaves behind."""
SPARE: Final = "MUSTER_SPARE"
"""Set for a process that loads the program and then waits to become a rank."""
SPARE_RANK: Final = 4095
"""The rank in the process tag of a spare process. No synchronous job has so many ranks."""
CHECK: Final = "MUSTER_CHECK"
"""Set to 1 for scripts that `muster check` runs, whose hooks may have files to leave alone."""
CHECK_STEPS: Final = "MUSTER_CHECK_STEPS"
CHECK_KILLS: Final = "MUSTER_CHECK_KILLS"
RESTORE_FROM: Final = "MUSTER_RESTORE_FROM"
AGENT_FD: Final = "MUSTER_AGENT_FD"
AGENT_SOCKET: Final = "MUSTER_AGENT_SOCKET"
HAS_JOINED: Final = "MUSTER_HAS_JOINED"
"""Set by a process that has joined for those that it starts: they are not the rank."""
STORAGE_SOCKET: Final = "MUSTER_STORAGE_SOCKET"
SENDS_CHECKPOINTS: Final = "MUSTER_SENDS_CHECKPOINTS"
PREFORK_FD: Final = "MUSTER_PREFORK_FD"
"""The descriptor of a prefork server's channel to its agent."""
LIFELINE_FD: Final = "MUSTER_LIFELINE_FD"
"""The descriptor of a pipe that closes when `muster up` ends, which ends its services."""
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Where a program may write its error, as torch's `@record` does."""
STORE_KEYS: Final = (
    "S3_ACCESS_KEY",
    "S3_SECRET_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
"""The keys of an object store. Of a job's processes only its storage process gets them."""
SERVICE_ONLY: Final = frozenset(
    {
        "MUSTER_DATABASE_URL",
        "MUSTER_TOKEN",
        LIFELINE_FD,
        *STORE_KEYS,
        # Of the service's own Slurm allocation; Lightning would take them for those of the rank.
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
    }
)
"""Variables of the service that no rank inherits."""

HOST_COUNT: Final = "MUSTER_HOST_COUNT"
ATTEMPT_VARIABLES: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "MUSTER_GENERATION"),
        *(PROCESS_TAG, ERROR_FILE, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", HOST_COUNT),
    }
)
"""Variables that differ between the attempts of a job. A spare process gets them last."""

SINGLE_THREADED: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""One thread per rank: ranks are the parallelism, and the number of BLAS threads changes the bits
of a product. Set before numpy is imported; a user's own values win."""

RANK_DEFAULTS: Final[Mapping[str, str]] = {
    **SINGLE_THREADED,
    "PYTHONHASHSEED": "0",  # the order of a set of names is the same in all attempts
    "PYTHONUNBUFFERED": "1",  # live logs
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a group that lost a rank fails instead of hanging
}
"""Variables of a rank unless the user has set them."""

ONE_HOST_DEFAULTS: Final[Mapping[str, str]] = {
    "GLOO_SOCKET_IFNAME": "lo",  # the name of the host need not resolve
}
"""Further ones, of a rank whose job has one host."""


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


_UNIONS: Final = (Union, UnionType)


class Variable(NamedTuple):
    """The declaration of one environment variable, as the metadata of a settings field."""

    name: str
    meaning: str = ""
    low: float | None = None
    high: float | None = None

    def parse(self, text: str, kind: Any) -> Any:  # noqa: ANN401  a type and its value
        """Return `text` as a value of type `kind`, or raise `InvalidEnvironment`."""
        bare = bare_type(kind)
        limited = kind
        if self.high is not None and get_origin(bare) not in _UNIONS:
            limited = Annotated[bare, Meta(ge=self.low, le=self.high)]
        value: object = text
        try:
            if bare in (Path, Location):
                value = text = expand_home(text)
            if bare == Location:
                return parse_location(text, Path().absolute())
            if bare is range:
                return _port_range(text)
            if bare is Path and text.startswith(SCHEME):
                raise InvalidEnvironment(
                    self.name, text, "a path, as this cannot be in a store yet"
                )
            if get_origin(bare) is tuple or bare is KeepBest:
                value = msgspec.json.decode(text) or {}  # an empty list is no command
            elif get_origin(bare) is frozenset:
                value = [word.strip() for word in text.lower().split(",") if word.strip()]
            elif bare is bool:
                value = {"yes": "true", "no": "false"}.get(text.lower(), text)
            return msgspec.convert(value, limited, strict=False, dec_hook=_path)
        except (msgspec.MsgspecError, InvalidLocation, ValueError, RecursionError):
            raise InvalidEnvironment(self.name, text, self._wanted(bare)) from None

    def _wanted(self, kind: Any) -> str:  # noqa: ANN401  a type
        if get_origin(kind) is Literal:
            return f"one of {', '.join(get_args(kind))}"
        if get_origin(kind) is tuple:
            return 'a JSON list of words, such as ["python", "train.py"]'
        if kind == Location:
            return "a path, or s3://bucket/prefix"
        if get_origin(kind) in _UNIONS:
            number, words = get_args(kind)
            return f"{self._wanted(bare_type(number))}, or {' or '.join(get_args(words))}"
        if kind is range:
            return "two ports, such as 29600-29999"
        words = {bool: "1 or 0", int: "an integer", float: "a number", Path: "a path"}
        wanted = str(words.get(kind, 'JSON such as {"metric": "val_loss"}'))
        if kind is bool or self.high is None:
            return wanted
        low = f"{self.low or 0:.15g}"
        if self.high >= SECONDS_LIMIT:
            return f"{wanted}, {low} or more"
        return f"{wanted} from {low} to {self.high:.15g}"


def variables_of(settings: type[msgspec.Struct]) -> dict[str, tuple[Variable, Any]]:
    """Return the variable and the type of each field of a settings class that has a variable."""
    found = {}
    for field, hint in get_type_hints(settings, include_extras=True).items():
        for variable in getattr(hint, "__metadata__", ()):
            found[field] = variable, hint.__origin__
    return found


ORPHAN_VARIABLE: Final = Variable(
    ORPHAN_TIMEOUT,
    "Seconds that ranks go on without a coordinator before they checkpoint and exit.",
    0,
    SECONDS_LIMIT,
)

RANK_PORTS: Final = Variable(
    "MUSTER_RANK_PORTS",
    "Ports at which the ranks of a host accept those of other hosts, such as `29600-29999`.",
)

SAME_ON_ALL_HOSTS: Final = (
    *("OPENBLAS_", "NPY_", "MKL_", "ATEN_", "NVPL_BLAS_"),  # how numbers are computed
    *("S3_", "AWS_"),  # which object store it is; its keys travel apart
    RANK_PORTS.name,
)
"""How the variables of the coordinator begin that agents on other hosts get."""

TRACE: Final = Variable(
    "MUSTER_TRACE", "Absolute path of a file to which every process appends its time stamps."
)

USE_S3: Final = Variable(
    "USE_S3", "`1`: checkpoints and data that name no place are in the bucket."
)
S3_BUCKET: Final = Variable("S3_BUCKET", "The bucket of `USE_S3`.")
DEFAULT_BUCKET: Final = "training-data"


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
        _check_id("JOB_ID", own["job_id"])
        job = {"world_size": world_size, **_read_job(environ)}
        spec = _checked(JobSpec(**job))
        if own.get("rank", 0) >= spec.world_size:
            raise InvalidEnvironment("RANK", environ["RANK"], f"in [0, {spec.world_size})")
        fields = {
            field: getattr(spec, field)
            for field in cls.__struct_fields__
            if field in JOB_VARIABLES and field not in _NOT_FOR_RANKS
        }
        return cls(**own, **fields | {"batch_size": spec.effective_batch_size})


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


def read_fields(settings: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields whose variables are set, and the default places."""
    defaults = _DIRECTORIES
    if USE_S3.parse(environ.get(USE_S3.name) or "0", bool):
        bucket = f"{SCHEME}{environ.get(S3_BUCKET.name) or DEFAULT_BUCKET}"
        defaults = {"CHECKPOINT_DIR": f"{bucket}/checkpoints", "DATASET_DIR": f"{bucket}/shards"}
    return {
        field: variable.parse(text, kind)
        for field, (variable, kind) in variables_of(settings).items()
        if (text := environ.get(variable.name) or defaults.get(variable.name))
    }


def _read_job(environ: Mapping[str, str]) -> dict[str, Any]:
    hints = get_type_hints(JobSpec, include_extras=True)
    found = {}
    for field, name in JOB_VARIABLES.items():
        if text := environ.get(name):
            limits = msgspec.structs.astuple(LIMITS[field]) if field in LIMITS else (None, None)
            found[field] = Variable(name, "", *limits).parse(text, hints[field])
    if not re.fullmatch(RESUME_PATTERN, found.get("resume_from", "a")):
        raise InvalidEnvironment("MUSTER_RESUME_FROM", found["resume_from"], RESUME_WANTED)
    if not is_program(found.get("program", "a:b")):
        raise InvalidEnvironment("MUSTER_PROGRAM", found["program"], PROGRAM_WANTED)
    return found


def bare_type(kind: Any) -> Any:  # noqa: ANN401  a type
    """Return a type without its annotations and without None."""
    if get_origin(kind) is Annotated:
        return bare_type(get_args(kind)[0])
    if NoneType in get_args(kind):
        return bare_type(next(part for part in get_args(kind) if part is not NoneType))
    return kind


def _port_range(text: str) -> range:
    low, high = map(int, text.split("-"))
    if not 0 < low <= high < 1 << 16:
        raise ValueError(text)
    return range(low, high + 1)


def _path(_: type, text: str) -> Path:
    return Path(text).absolute()


def _check_id(name: str, job_id: str | None) -> None:
    if job_id is not None and not re.fullmatch(JOB_ID_PATTERN, job_id):
        raise InvalidEnvironment(name, job_id, "a job id: letters, digits, '-' and '_'")


def _checked(spec: JobSpec) -> JobSpec:
    """Return `spec`, or raise `InvalidEnvironment` if its batch cannot be cut into shards."""
    shards, size = spec.virtual_shards, spec.effective_batch_size
    if not is_power_of_two(shards):
        raise InvalidEnvironment("MUSTER_VIRTUAL_SHARDS", str(shards), "a power of two")
    if spec.mode == "synchronous" and not fits_shards(size, shards):
        wanted = f"a multiple of {shards}, {SAMPLES_PER_SHARD_MIN * shards} or more"
        raise InvalidEnvironment("MUSTER_BATCH_SIZE", str(size), wanted)
    return spec
