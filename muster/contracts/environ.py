"""The environment contract: every variable we read or write, in one file.

Three families: the public names that configure `python -P -m worker` and `python -P -m coordinator`
started by hand, the names that torchrun gives to a rank, and our own with the prefix ``MUSTER_``.
`rank_environment` writes what `RankSettings.read` reads.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final, get_args

import msgspec

from muster.contracts.batches import SAMPLES_PER_SHARD_MIN, fits_shards, is_power_of_two
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.secrets import LENT
from muster.contracts.spec import (
    ENVIRONMENT_NAME_PATTERN,
    JOB_ID_PATTERN,
    LIMITS,
    PROGRAM_WANTED,
    BackendChoice,
    JobSpec,
    Mode,
    RestartScope,
    is_program,
    usual_mode,
)
from muster.contracts.token import id_in, sha256_of
from muster.contracts.variables import (
    choice,
    integer,
    is_http,
    number,
    optional_integer,
    switch,
)

DEFAULT_CHECKPOINT_DIR: Final = "./checkpoints"
DEFAULT_DATASET_DIR: Final = "./data/shards"
DEFAULT_PORT: Final = 8000
DEFAULT_HOST: Final = "127.0.0.1"

LOCAL_NAMES: Final = (DEFAULT_HOST, "localhost", "::1")
"""By which every service is known on its own machine."""

HEARTBEAT_SECONDS: Final = 2.0
PULSE_SECONDS: Final = 1.0
"""Of an agent, which speaks for all of its ranks."""

BEATS_IN_TIMEOUT: Final = 5
"""A short heartbeat timeout makes ranks beat faster: one late beat is no failure. Agents and
their pulse likewise."""

TLS_CERTFILE: Final = "MUSTER_TLS_CERTFILE"

CA_FILE: Final = "MUSTER_CA_FILE"
"""To a client the certificates that it trusts in place of the system's."""

MARK: Final = "MUSTER_MARK"
"""Names the job's uid, the rank and the incarnation in every process that a rank starts, so that
what it leaves behind can be told from what is not ours."""


AGENT_FD: Final = "MUSTER_AGENT_FD"
"""The descriptor of a rank's channel to its agent."""

AGENT_SOCKET: Final = "MUSTER_AGENT_SOCKET"
"""Where a rank finds the agent that takes over when its own has died."""

ORPHAN_TIMEOUT: Final = "MUSTER_ORPHAN_TIMEOUT"
ORPHAN_TIMEOUT_SECONDS: Final = 120.0

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Where a program may write down its error, as torch's `@record` does."""

TEMPLATE_FD: Final = "MUSTER_TEMPLATE_FD"
"""The descriptor of a template's channel to its agent."""

TOKEN: Final = "MUSTER_TOKEN"  # noqa: S105  its name
"""To a service one more token, of scope admin, unless it is one that some service made; to a
client the one that it shows."""

TOKEN_LENGTH_MIN: Final = 32
"""Of a token that a person made up: `openssl rand -hex 32` gives 64."""

LIFELINE_FD: Final = "MUSTER_LIFELINE_FD"
"""The descriptor of the pipe that ends with the keeper of a service."""

CONNECTIONS_AT_ONCE: Final = 128
"""Of one client: a browser opens six, a script that forgets to close them any number."""

_PLACES_OF_SLURM: Final = {"SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}
"""Of the service itself, in an allocation; Lightning takes them for those of the rank."""

NOT_FOR_RANKS: Final = frozenset({"MUSTER_DATABASE_URL", TOKEN, LIFELINE_FD, *_PLACES_OF_SLURM})
"""A program that somebody submitted has no business with the service's own keys and pipes."""

MARK_WIDTH: Final = 64
"""Marks are written over one another in place (`muster.template`), so they have room to spare:
a uid of 32 digits, a rank of 4, an incarnation."""

THREAD_PINS: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""One thread per rank: ranks are the parallelism, and the number of BLAS threads changes the bits
of a product. To be set before numpy is imported; what a person has set holds."""


UNLESS_SET: Final[Mapping[str, str]] = {
    **THREAD_PINS,
    "PYTHONUNBUFFERED": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # All ranks are on one host, whose name need not lead anywhere.
    "GLOO_SOCKET_IFNAME": "lo",
}
"""What a rank gets unless the person has set it: logs that are live, and a group that has lost a
rank fails instead of hanging."""


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service of one installation keeps its state and listens."""

    data_dir: Path
    database_url: str
    host: str
    port: int
    slots: int
    """How many ranks may run at once on this machine."""
    checkpoint_dir: Path
    dataset_dir: Path
    orphan_timeout_seconds: float
    """How long ranks go on without a coordinator before they save and exit."""

    @classmethod
    def read(cls, environ: Mapping[str, str], *, cores: int) -> "ServiceSettings":
        """Read the product settings; `cores` is the machine's number of processors."""
        _refuse_s3(environ)
        names_lent(environ)
        data_dir = Path(
            environ.get("MUSTER_DATA_DIR")
            or Path(environ.get("HOME", "/")) / ".local" / "share" / "muster"
        ).absolute()
        return cls(
            data_dir=data_dir,
            database_url=environ.get("MUSTER_DATABASE_URL") or f"sqlite:///{data_dir}/muster.db",
            host=environ.get("MUSTER_HOST") or DEFAULT_HOST,
            port=integer(environ, "MUSTER_PORT", DEFAULT_PORT, low=0, high=65535),
            slots=integer(environ, "MUSTER_SLOTS", 2 * cores, low=1, high=1_000_000),
            checkpoint_dir=Path(environ.get("CHECKPOINT_DIR") or DEFAULT_CHECKPOINT_DIR).absolute(),
            dataset_dir=Path(environ.get("DATASET_DIR") or DEFAULT_DATASET_DIR).absolute(),
            orphan_timeout_seconds=number(environ, ORPHAN_TIMEOUT, ORPHAN_TIMEOUT_SECONDS),
        )


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may come in to a service, by which names and how often."""

    token_sha256: str | None
    """Of MUSTER_TOKEN; the text itself is not kept."""
    require_token: bool
    """Also of the service's own user on this machine: a proxy may run as the same one."""
    allowed_hosts: frozenset[str]
    """Names, beside the one it is bound to, by which other machines know the service."""
    tls_certfile: Path | None
    tls_keyfile: Path | None
    """None: the key is in the file of the certificate."""
    allow_plain_http: bool
    """From other machines, too: somebody else sees to it that nobody listens."""
    requests_per_second: int
    """Of one client, in the long run."""
    requests_at_once: int
    """Of one client, its open streams included."""
    connections_at_once: int
    """From one other machine, or of one other user of this one."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "DoorSettings":
        certfile, keyfile = environ.get(TLS_CERTFILE), environ.get("MUSTER_TLS_KEYFILE")
        if keyfile and not certfile:
            raise InvalidEnvironment(
                "MUSTER_TLS_KEYFILE", keyfile, f"of use without {TLS_CERTFILE}"
            )
        hosts = environ.get("MUSTER_ALLOWED_HOSTS", "").lower().split(",")
        return cls(
            token_sha256=_token_sha256(environ),
            require_token=switch(environ, "MUSTER_REQUIRE_TOKEN"),
            allowed_hosts=frozenset(host.strip() for host in hosts if host.strip()),
            tls_certfile=Path(certfile).absolute() if certfile else None,
            tls_keyfile=Path(keyfile).absolute() if keyfile else None,
            allow_plain_http=switch(environ, "MUSTER_ALLOW_PLAIN_HTTP"),
            requests_per_second=integer(
                environ, "MUSTER_REQUESTS_PER_SECOND", 100, low=1, high=1_000_000
            ),
            requests_at_once=integer(environ, "MUSTER_REQUESTS_AT_ONCE", 64, low=1, high=10_000),
            connections_at_once=integer(
                environ, "MUSTER_CONNECTIONS_AT_ONCE", CONNECTIONS_AT_ONCE, low=1, high=10_000
            ),
        )


def is_clients_token(environ: Mapping[str, str]) -> bool:
    """Whether MUSTER_TOKEN is of the form that services make.

    Whoever exported it means to show it to another service, and not to open their own to all who
    have it.
    """
    return id_in(environ.get(TOKEN, "")) is not None


def _token_sha256(environ: Mapping[str, str]) -> str | None:
    text = environ.get(TOKEN)
    if not text or is_clients_token(environ):
        return None
    if len(text) < TOKEN_LENGTH_MIN or not re.fullmatch(r"[!-~]+", text):
        wanted = f"{TOKEN_LENGTH_MIN} or more letters and digits (try: openssl rand -hex 32)"
        raise InvalidEnvironment(TOKEN, "…", wanted)  # what it says is nobody's business
    return sha256_of(text)


def names_lent(environ: Mapping[str, str]) -> frozenset[str]:
    """Return which variables of a service its jobs may ask for, as secrets.

    Raises `InvalidEnvironment` for what is no name, and for the service's own keys.
    """
    text = environ.get(LENT, "")
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if not all(re.fullmatch(ENVIRONMENT_NAME_PATTERN, name) for name in names):
        raise InvalidEnvironment(LENT, text, "a list of variables' names, separated by commas")
    if names & NOT_FOR_RANKS:
        wanted = f"a list without {', '.join(sorted(names & NOT_FOR_RANKS))}, which is no job's"
        raise InvalidEnvironment(LENT, text, wanted)
    return names


def api_url(environ: Mapping[str, str]) -> str:
    """Return where a client finds the API: MUSTER_URL, or what MUSTER_HOST and MUSTER_PORT say."""
    url = environ.get("MUSTER_URL")
    if url:
        if not is_http(url):
            wanted = (
                f"a URL such as http://host:{DEFAULT_PORT}, with no user ({TOKEN} is the key) and "
                "no query in it"
            )
            raise InvalidEnvironment("MUSTER_URL", "…", wanted)  # it may hold a password
        return url.rstrip("/")
    return own_url(environ)


def own_url(environ: Mapping[str, str]) -> str:
    """Return where the API of this environment is found on its own machine."""
    host = _found_at(environ.get("MUSTER_HOST") or DEFAULT_HOST)
    port = integer(environ, "MUSTER_PORT", DEFAULT_PORT, low=1, high=65535)
    scheme = "https" if environ.get(TLS_CERTFILE) else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _found_at(host: str) -> str:
    """Return where this machine finds what listens on `host`, be that all of its addresses."""
    try:
        is_anywhere = host == "0" or ip_address(host).is_unspecified
    except ValueError:
        return host  # a name
    loopback = "::1" if ":" in host else DEFAULT_HOST
    return loopback if is_anywhere else host


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank needs to know; what a person or an agent put into its environment."""

    job_id: str
    job_uid: str | None
    """None when started by hand: then any checkpoint under this id is its own."""
    rank: int
    world_size: int
    restart_count: int
    generation: int | None
    """Fences checkpoints: a commit below the newest one's generation is refused. None when
    started by hand: one above the newest."""
    checkpoint_dir: Path
    checkpoint_every: int
    keep_last: int
    dataset_dir: Path
    sleep_sec: float
    epochs: int
    batch_size: int
    seed: int
    heartbeat_seconds: float
    resume_from: str | None
    command: tuple[str, ...] | None
    mode: Mode
    program: str | None
    virtual_shards: int
    backend: BackendChoice
    replay_every: int | None
    agent_fd: int | None
    """The inherited socket to the agent. None: nobody supervises this process."""
    agent_socket: Path | None
    """Where another agent listens once that one is gone."""
    orphan_timeout_seconds: float
    """How long this process goes on without any agent before it saves and exits."""

    @classmethod
    def read(
        cls, environ: Mapping[str, str], *, world_size: int, job_id: str = "local"
    ) -> "RankSettings":
        """Read a rank's settings, with the documented defaults for every missing variable.

        `world_size` and `job_id` are what holds where nobody says: 4 for a rank started by hand,
        1 and its own name for a script that runs all by itself.
        """
        _refuse_s3(environ)
        default = JobSpec()
        world_size = integer(environ, "WORLD_SIZE", world_size, low=1)
        command = environ.get("MUSTER_COMMAND")
        managed = _managed(environ)
        return cls(
            job_id=_checked_id(environ, "JOB_ID", job_id) or job_id,
            job_uid=environ.get("MUSTER_JOB_UID") or None,
            rank=integer(environ, "RANK", 0, low=0, high=world_size - 1),
            world_size=world_size,
            restart_count=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0, low=0),
            generation=optional_integer(environ, "MUSTER_GENERATION"),
            checkpoint_dir=Path(environ.get("CHECKPOINT_DIR") or DEFAULT_CHECKPOINT_DIR).absolute(),
            checkpoint_every=integer(environ, "CHECKPOINT_EVERY", default.checkpoint_every, low=1),
            keep_last=integer(environ, "MUSTER_KEEP_LAST", default.keep_last, low=1),
            dataset_dir=Path(environ.get("DATASET_DIR") or DEFAULT_DATASET_DIR).absolute(),
            sleep_sec=number(environ, "SLEEP_SEC", default.sleep_sec),
            epochs=integer(environ, "MUSTER_EPOCHS", default.epochs, low=1),
            batch_size=managed.effective_batch_size,
            seed=integer(environ, "MUSTER_SEED", default.seed, low=0),
            heartbeat_seconds=_heartbeat_seconds(environ),
            resume_from=_checked_id(environ, "MUSTER_RESUME_FROM", None),
            command=_command(command) if command else None,
            mode=managed.mode,
            program=managed.program,
            virtual_shards=managed.virtual_shards,
            backend=managed.backend,
            replay_every=managed.replay_every,
            agent_fd=optional_integer(environ, AGENT_FD),
            agent_socket=Path(environ[AGENT_SOCKET]) if environ.get(AGENT_SOCKET) else None,
            orphan_timeout_seconds=number(environ, ORPHAN_TIMEOUT, ORPHAN_TIMEOUT_SECONDS),
        )


def spec_from_environment(environ: Mapping[str, str]) -> JobSpec:
    """Return the job that the public names describe, for a coordinator started by hand."""
    default = JobSpec()
    managed = _managed(environ)
    command = _command(environ["MUSTER_COMMAND"]) if environ.get("MUSTER_COMMAND") else None
    return JobSpec(
        world_size=integer(environ, "WORLD_SIZE", default.world_size, low=1),
        checkpoint_every=integer(environ, "CHECKPOINT_EVERY", default.checkpoint_every, low=1),
        sleep_sec=number(environ, "SLEEP_SEC", default.sleep_sec),
        heartbeat_timeout=number(environ, "HEARTBEAT_TIMEOUT", default.heartbeat_timeout),
        max_restarts=integer(environ, "MAX_RESTARTS", default.max_restarts, low=0),
        checkpoint_dir=environ.get("CHECKPOINT_DIR") or None,
        dataset_dir=environ.get("DATASET_DIR") or None,
        epochs=integer(environ, "MUSTER_EPOCHS", default.epochs, low=1),
        batch_size=managed.batch_size,
        seed=integer(environ, "MUSTER_SEED", default.seed, low=0),
        command=command,
        restart_scope=choice(
            environ, "MUSTER_RESTART_SCOPE", get_args(RestartScope), default.restart_scope
        ),
        mode=managed.mode if environ.get("MUSTER_MODE") else usual_mode(command),
        program=managed.program,
        virtual_shards=managed.virtual_shards,
        backend=managed.backend,
        replay_every=managed.replay_every,
    )


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What one incarnation of one rank is given beside the spec of its job."""

    job_id: str
    job_uid: str
    rank: int
    incarnation: int
    checkpoint_dir: Path
    dataset_dir: Path
    master_port: int


def rank_environment(spec: JobSpec, assignment: Assignment) -> dict[str, str]:
    """Return every variable of a supervised rank, the user's own `env` first.

    The torchrun names let an unmodified script find its place; ranks of one host only, so the
    local rank is the rank.
    """
    environment = {
        **spec.env,
        "JOB_ID": assignment.job_id,
        "RANK": str(assignment.rank),
        "LOCAL_RANK": str(assignment.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(assignment.rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RUN_ID": assignment.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(assignment.incarnation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Without it torch's gloo rendezvous reads the stale keys of the group that died.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CHECKPOINT_DIR": str(assignment.checkpoint_dir),
        "CHECKPOINT_EVERY": str(spec.checkpoint_every),
        "DATASET_DIR": str(assignment.dataset_dir),
        "SLEEP_SEC": repr(spec.sleep_sec),
        "HEARTBEAT_TIMEOUT": repr(spec.heartbeat_timeout),
        "MAX_RESTARTS": str(spec.max_restarts),
        "MUSTER_HEARTBEAT_SECONDS": repr(
            min(HEARTBEAT_SECONDS, spec.heartbeat_timeout / BEATS_IN_TIMEOUT)
        ),
        "MUSTER_JOB_UID": assignment.job_uid,
        # Written even when empty: what the service has in its own environment is not the job's.
        "MUSTER_RESUME_FROM": spec.resume_from or "",
        "MUSTER_COMMAND": msgspec.json.encode(spec.command).decode() if spec.command else "",
        "MUSTER_GENERATION": str(assignment.incarnation),
        "MUSTER_KEEP_LAST": str(spec.keep_last),
        "MUSTER_EPOCHS": str(spec.epochs),
        "MUSTER_BATCH_SIZE": str(spec.effective_batch_size),
        "MUSTER_SEED": str(spec.seed),
        "MUSTER_MODE": spec.mode,
        "MUSTER_PROGRAM": spec.program or "",
        "MUSTER_VIRTUAL_SHARDS": str(spec.virtual_shards),
        "MUSTER_BACKEND": spec.backend,
        "MUSTER_REPLAY_EVERY": "" if spec.replay_every is None else str(spec.replay_every),
        MARK: mark(assignment.job_uid, assignment.rank, assignment.incarnation),
    }
    return {**UNLESS_SET, **environment}


def pulse_seconds(spec: JobSpec) -> float:
    """Return how often an agent gives a sign of life of its own."""
    return min(PULSE_SECONDS, spec.heartbeat_timeout / BEATS_IN_TIMEOUT)


def mark(job_uid: str, rank: int, incarnation: int) -> str:
    """Return the value of `MARK` for one incarnation of one rank."""
    return f"{job_uid}/{rank}/{incarnation}"


def _managed(environ: Mapping[str, str]) -> JobSpec:
    """Return a spec of what says how the ranks train together; everything else is its default."""
    spec = JobSpec(
        mode=choice(environ, "MUSTER_MODE", get_args(Mode), JobSpec().mode),
        program=environ.get("MUSTER_PROGRAM") or None,
        virtual_shards=_limited(environ, "virtual_shards") or JobSpec().virtual_shards,
        batch_size=_limited(environ, "batch_size"),
        backend=choice(environ, "MUSTER_BACKEND", get_args(BackendChoice), JobSpec().backend),
        replay_every=_limited(environ, "replay_every"),
    )
    if spec.program is not None and not is_program(spec.program):
        raise InvalidEnvironment("MUSTER_PROGRAM", spec.program, PROGRAM_WANTED)
    shards, size = spec.virtual_shards, spec.effective_batch_size
    if not is_power_of_two(shards):
        raise InvalidEnvironment("MUSTER_VIRTUAL_SHARDS", str(shards), "a power of two")
    if spec.mode == "synchronous" and not fits_shards(size, shards):
        wanted = f"a multiple of {shards}, {SAMPLES_PER_SHARD_MIN * shards} or more"
        raise InvalidEnvironment("MUSTER_BATCH_SIZE", str(size), wanted)
    return spec


def _limited(environ: Mapping[str, str], field: str) -> int | None:
    """Return what the variable of a spec's field says, within the field's limits."""
    name = f"MUSTER_{field.upper()}"
    low, high = (int(limit) for limit in msgspec.structs.astuple(LIMITS[field]))
    return integer(environ, name, low, low=low, high=high) if environ.get(name) else None


def _checked_id(environ: Mapping[str, str], name: str, default: str | None) -> str | None:
    """Return an id that is safe in a path."""
    text = environ.get(name) or default
    if text is not None and not re.fullmatch(JOB_ID_PATTERN, text):
        raise InvalidEnvironment(name, text, "a job's id: letters, digits, '-' and '_'")
    return text


def _refuse_s3(environ: Mapping[str, str]) -> None:
    text = environ.get("USE_S3", "")
    if text.lower() not in {"", "0", "false", "no"}:
        raise InvalidEnvironment("USE_S3", text, "possible in this version, which saves to disk")


def _heartbeat_seconds(environ: Mapping[str, str]) -> float:
    name = "MUSTER_HEARTBEAT_SECONDS"
    seconds = number(environ, name, HEARTBEAT_SECONDS)
    if seconds == 0:
        raise InvalidEnvironment(name, environ[name], "a number of seconds, more than 0")
    return seconds


def _command(text: str) -> tuple[str, ...]:
    wanted = 'a JSON list of words, such as ["python", "train.py"]'
    try:
        words = msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError):
        raise InvalidEnvironment("MUSTER_COMMAND", text, wanted) from None
    if not words:
        raise InvalidEnvironment("MUSTER_COMMAND", text, wanted)
    return words
