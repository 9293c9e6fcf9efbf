"""The settings of the services and of their clients, read from the environment."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, get_args
from urllib.parse import urlsplit

import msgspec

from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job.engine import Engine
from muster.contracts.job.field_types import ENVIRONMENT_NAME_PATTERN
from muster.contracts.job.secrets import SHARED_VARIABLES
from muster.contracts.location import Location
from muster.contracts.settings.environ import ORPHAN_TIMEOUT_SECONDS
from muster.contracts.settings.names import SERVICE_ONLY
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.variables import (
    DEFAULT_BUCKET,
    INTEGER_MAX,
    ORPHAN_VARIABLE,
    RANK_PORTS,
    S3_BUCKET,
    TRACE,
    USE_S3,
    Variable,
    read_fields,
)
from muster.contracts.token import id_in, sha256_of

DEFAULT_PORT: Final = 8000
DEFAULT_HOST: Final = "127.0.0.1"
LOOPBACK_NAMES: Final = (DEFAULT_HOST, "localhost", "::1")

SLOTS_PER_CORE: Final = 2  # unless a setting says how many ranks run at once

TOKEN_LENGTH_MIN: Final = 32  # of a token that a user made up: `openssl rand -hex 32` gives 64

TOKEN: Final = "MUSTER_TOKEN"  # noqa: S105  its name
"""For a service an additional token of scope admin, unless a service issued it; for a client the
token that it sends."""
TLS_CERTFILE: Final = "MUSTER_TLS_CERTFILE"
CLUSTER: Final = "MUSTER_CLUSTER"
CA_FILE: Final = "MUSTER_CA_FILE"
"""For a client the certificates that it trusts instead of the system's."""


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service of one installation keeps its state and listens."""

    data_dir: Annotated[
        Path, Variable("MUSTER_DATA_DIR", "Database, logs, secrets and small data sets.")
    ]
    database_url: Annotated[
        str | None,
        Variable(
            "MUSTER_DATABASE_URL",
            "`sqlite:///PATH` or `postgresql+psycopg://USER@HOST/NAME`. In a password write "
            "`@` as `%40` and `?` as `%3F`.",
        ),
    ] = None
    host: Annotated[
        str, Variable("MUSTER_HOST", "Address of the API. Other machines need tokens and TLS.")
    ] = DEFAULT_HOST
    port: Annotated[
        int, Variable("MUSTER_PORT", "Port of the API; 0 takes any free port.", 0, 65535)
    ] = DEFAULT_PORT
    agent_address: Annotated[
        str | None,
        Variable(
            "MUSTER_AGENT_ADDRESS",
            "`address:port` where agents of other hosts reach the coordinator. Their connections "
            "are encrypted, and each agent proves that this service started it. Without it they "
            "come through the SSH connections that start them.",
        ),
    ] = None
    slots: Annotated[
        int,
        Variable("MUSTER_SLOTS", "Ranks that run at once; a larger job runs alone.", 1, 1_000_000),
    ]
    checkpoint_dir: Annotated[
        Location, Variable("CHECKPOINT_DIR", "Checkpoints of jobs that name none.")
    ]
    dataset_dir: Annotated[Location, Variable("DATASET_DIR", "Data of jobs that name no place.")]
    cluster: Annotated[
        Path | None, Variable(CLUSTER, "The cluster file, which describes the machines.")
    ] = None
    nodes: Annotated[
        Path | None,
        Variable("MUSTER_NODES", "The file of the nodes of a household; `muster node` sets it."),
    ] = None
    engines: Annotated[
        frozenset[str],
        Variable(
            "MUSTER_ENGINES",
            "The engines that jobs may name, separated by commas: local, ssh, mesh, slurm, "
            "kubernetes.",
        ),
    ] = frozenset({"local", "ssh", "mesh"})
    orphan_timeout_seconds: Annotated[float, ORPHAN_VARIABLE] = ORPHAN_TIMEOUT_SECONDS
    rank_ports: Annotated[range | None, RANK_PORTS] = None
    trace: Annotated[Path | None, TRACE] = None

    @classmethod
    def read(cls, environ: Mapping[str, str], *, cores: int) -> "ServiceSettings":
        """Read the settings of a service; `cores` is the number of processors that it may use.

        Raises `InvalidEnvironment`, also for the settings of the store and of secrets.
        """
        shared_variables(environ)
        store = S3Settings.read(environ)  # an error here would meet every submission
        data_dir = Path(environ.get("HOME", "/"), ".local", "share", "muster").absolute()
        found = {"data_dir": data_dir, "slots": SLOTS_PER_CORE * cores, **read_fields(cls, environ)}
        if not (environ.get("CHECKPOINT_DIR") or store.use_s3):
            # The same wherever the services are started, unlike the default by hand.
            found["checkpoint_dir"] = DataDir(found["data_dir"]).checkpoints
        settings = cls(**found)
        settings.agent_endpoint  # noqa: B018  raises for an invalid address
        if unknown := settings.engines - {*get_args(Engine)}:
            wanted = f"a list of {', '.join(get_args(Engine))}"
            raise InvalidEnvironment("MUSTER_ENGINES", ",".join(sorted(unknown)), wanted)
        return settings

    @property
    def database(self) -> str | Path:
        """The URL of the database, or its file: a path may have signs that mean more in a URL."""
        return self.database_url or DataDir(self.data_dir).database

    @property
    def agent_endpoint(self) -> tuple[str, int] | None:
        """Host and port of `agent_address`. Raises `InvalidEnvironment`."""
        if self.agent_address is None:
            return None
        found = re.fullmatch(r"\[?([^\s/@\[\]]+)\]?:([0-9]{1,5})", self.agent_address)
        if found is None or not 0 < int(found[2]) < 1 << 16 or not _is_address(found[1]):
            wanted = "an IP address of this host and a port, such as 10.0.0.1:7000"
            raise InvalidEnvironment("MUSTER_AGENT_ADDRESS", self.agent_address, wanted)
        return found[1], int(found[2])


def _is_address(text: str) -> bool:
    """True if others can use it: agents look up no names, and 0.0.0.0 means each itself."""
    try:
        return not ip_address(text).is_unspecified
    except ValueError:
        return False


class S3Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The object store of services, and of ranks started by hand; and the cache before it."""

    use_s3: Annotated[bool, USE_S3] = False
    bucket: Annotated[str, S3_BUCKET] = DEFAULT_BUCKET
    endpoint: Annotated[
        str | None, Variable("S3_ENDPOINT", "URL of an S3-compatible store; without it AWS.")
    ] = None
    access_key: Annotated[
        str | None,
        Variable("S3_ACCESS_KEY", "Its key. Without one it is found as AWS's own tools do."),
    ] = None
    secret_key: Annotated[str | None, Variable("S3_SECRET_KEY", "The secret of that key.")] = None
    cache_dir: Annotated[
        Path, Variable("MUSTER_CACHE_DIR", "Shards from the store; every job of the host uses it.")
    ]
    cache_bytes: Annotated[
        int, Variable("MUSTER_CACHE_BYTES", "The most that they take.", 1 << 20, INTEGER_MAX)
    ] = 50 << 30

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "S3Settings":
        cache_dir = Path(environ.get("HOME", "/"), ".cache", "muster", "shards").absolute()
        return cls(**{"cache_dir": cache_dir, **read_fields(cls, environ)})

    def __repr__(self) -> str:
        return f"S3Settings({self.endpoint})"  # no keys


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which clients a service accepts, and how many requests of each."""

    token_sha256: Annotated[
        str | None,
        Variable(
            TOKEN,
            "For commands and clients: the token they show. For a service: one more token of "
            "scope admin, unless a service issued it.",
        ),
    ] = None
    """The hash; the text itself is not kept."""
    require_token: Annotated[
        bool,
        Variable("MUSTER_REQUIRE_TOKEN", "`1`: this user, too, needs a token on this machine."),
    ] = False
    """A proxy may run as the same user."""
    allowed_hosts: Annotated[
        frozenset[str],
        Variable("MUSTER_ALLOWED_HOSTS", "Other host names of the API, separated by commas."),
    ] = frozenset()
    tls_certfile: Annotated[
        Path | None,
        Variable(TLS_CERTFILE, "PEM file with the certificate of the API and its chain."),
    ] = None
    tls_keyfile: Annotated[
        Path | None, Variable("MUSTER_TLS_KEYFILE", "PEM file with the key, without a password.")
    ] = None
    """None: the key is in the file of the certificate."""
    allow_plain_http: Annotated[
        bool, Variable("MUSTER_ALLOW_PLAIN_HTTP", "`1`: a proxy in front of the API does TLS.")
    ] = False
    requests_per_second: Annotated[
        int, Variable("MUSTER_REQUESTS_PER_SECOND", "Average of one client.", 1, 1_000_000)
    ] = 100
    requests_at_once: Annotated[
        int,
        Variable("MUSTER_REQUESTS_AT_ONCE", "Of one client, open streams included.", 1, 10_000),
    ] = 64

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "AccessSettings":
        found = read_fields(cls, environ)
        if "tls_keyfile" in found and "tls_certfile" not in found:
            name = "MUSTER_TLS_KEYFILE"
            raise InvalidEnvironment(name, environ[name], f"of use without {TLS_CERTFILE}")
        text = found.pop("token_sha256", None)
        if text is None or is_issued_token(environ):
            return cls(**found)
        if len(text) < TOKEN_LENGTH_MIN or not re.fullmatch(r"[!-~]+", text):
            wanted = f"{TOKEN_LENGTH_MIN} or more letters and digits (try: openssl rand -hex 32)"
            raise InvalidEnvironment(TOKEN, "…", wanted)
        return cls(token_sha256=sha256_of(text), **found)


def is_issued_token(environ: Mapping[str, str]) -> bool:
    """Return whether MUSTER_TOKEN has the form of the tokens that services issue.

    Such a token is meant for another service; our own does not accept it as an admin token.
    """
    return id_in(environ.get(TOKEN, "")) is not None


def shared_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the service's variables that jobs may refer to as secrets.

    Raises `InvalidEnvironment` for an invalid name, and for the service's own variables.
    """
    text = environ.get(SHARED_VARIABLES, "")
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if not all(re.fullmatch(ENVIRONMENT_NAME_PATTERN, name) for name in names):
        raise InvalidEnvironment(SHARED_VARIABLES, text, "a comma-separated list of variables")
    if names & SERVICE_ONLY:
        wanted = f"a list without {', '.join(sorted(names & SERVICE_ONLY))}"
        raise InvalidEnvironment(SHARED_VARIABLES, text, wanted)
    return names


def api_url(environ: Mapping[str, str]) -> str:
    """Return the URL of the API: MUSTER_URL, or else `local_url`."""
    url = environ.get("MUSTER_URL")
    if not url:
        return local_url(environ)
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises for an invalid port
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and url.isprintable()
        # Errors and `muster config` show the URL, so it must not hold a password.
        is_valid = is_valid and "@" not in parts.netloc and not set("?#") & set(url)
    except ValueError:
        is_valid = False
    if not is_valid:
        wanted = (
            f"a URL such as http://host:{DEFAULT_PORT}, without user ({TOKEN} is the key) or query"
        )
        raise InvalidEnvironment("MUSTER_URL", "…", wanted)
    return url.rstrip("/")


def local_url(environ: Mapping[str, str]) -> str:
    """Return the URL of this environment's API for clients on the same machine."""
    host = environ.get("MUSTER_HOST") or DEFAULT_HOST
    try:
        if host == "0" or ip_address(host).is_unspecified:
            host = "::1" if ":" in host else DEFAULT_HOST
    except ValueError:
        pass  # a name
    text = environ.get("MUSTER_PORT") or str(DEFAULT_PORT)
    port = Variable("MUSTER_PORT", "", 1, 65535).parse(text, int)
    scheme = "https" if environ.get(TLS_CERTFILE) else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
