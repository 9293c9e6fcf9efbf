"""The tables, and how a database gets them. Each column holds the field of its name in `records`.

A new database gets these; a test compares them with what the migrations make of an old one. Alembic
takes half of a command's start-up time, so it is imported only to migrate.

jobs ──< agents        the agent of a job on one host; deleted with the job, like all below
     ──< workers       a rank of the job
     ──< attempts      one process of a rank, and how it ended
     ──< members       a worker of a synchronous job's pool; kept when it has left
     ──< departures    a member that was asked to leave
     ──< commits       a durable checkpoint of all ranks together
     ──< epochs        the samples read in one pass over the data, and the samples expected
     ──< series        the points of its loss, throughput and metrics
     ──< events        the history of the job
answers                the first response to each idempotency key; outlives the job
hosts                  what each host has said about itself
leases                 which coordinator decides
tokens                 API tokens
"""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from importlib.resources import files
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

import msgspec
import sqlalchemy as sa

from database import HEAD
from database.errors import DatabaseError, SchemaRefused
from database.records import (
    AgentRecord,
    Attempt,
    CheckpointRecord,
    Event,
    HostRecord,
    Job,
    Lease,
    MemberRecord,
    RankRecord,
)
from muster.contracts.messages.rank import METRIC_NAME_LIMIT, EpochDone
from muster.contracts.series import Point
from muster.contracts.token import Token

if TYPE_CHECKING:
    from alembic.config import Config

_VERSIONS: Final = sa.table("alembic_version", sa.column("version_num"))

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SIGN_BIT: Final = 1 << 63


class UtcTime(sa.TypeDecorator[datetime]):
    """A time as whole microseconds since 1970: exact, and ordered as integers are.

    SQLite has no type for times and would compare texts. A time without a zone is refused.
    """

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> int | None:  # noqa: ARG002
        return None if value is None else (value - _EPOCH) // _MICROSECOND

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        return None if value is None else _EPOCH + value * _MICROSECOND


class Uint64(sa.TypeDecorator[int]):
    """An unsigned 64-bit number, such as a sum of hashes, in a signed column.

    The upper half is stored as negative numbers: equality is exact, order is not kept.
    """

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: sa.Dialect) -> int | None:  # noqa: ARG002
        if value is None:
            return None
        if not 0 <= value < _SIGN_BIT << 1:
            raise ValueError(f"{value} is not between 0 and 2**64 - 1")
        return value if value < _SIGN_BIT else value - (_SIGN_BIT << 1)

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> int | None:  # noqa: ARG002
        return value if value is None or value >= 0 else value + (_SIGN_BIT << 1)


class Json(sa.TypeDecorator[Any]):
    """A value as JSON text, checked against its type when it is read."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:  # noqa: ANN401  a class, or dict[…] and the like
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:  # noqa: ANN401, ARG002
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:  # noqa: ANN401, ARG002
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=self.kind)
        except msgspec.MsgspecError as error:
            kind = getattr(self.kind, "__name__", self.kind)
            raise DatabaseError(
                f"a row holds a {kind} that this version of Muster cannot read ({error}): "
                "upgrade Muster"
            ) from error


METADATA: Final = sa.MetaData(
    # Named constraints can be dropped by a later migration on any database.
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_TYPES: Final[dict[object, Any]] = {
    int: sa.BigInteger,
    float: sa.Double,
    bool: sa.Boolean,
    str: sa.Text,
    datetime: UtcTime,
    # Fields of these names, in any table.
    "actor": sa.String(255),
    "address": sa.String(255),
    "backend": sa.String(32),
    "consumed_hash": Uint64,
    "created_by": sa.String(255),
    "digest": sa.String(64),
    # The database counts it up; SQLite does so only for the type INTEGER, see `_table`.
    "event_id": sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
    "exit_code": sa.Integer,
    "exit_signal": sa.Integer,
    "expected_hash_sum": Uint64,
    "gpu_count": sa.Integer,
    "hash_sum": Uint64,
    "host": sa.String(63),
    "job_id": sa.String(63),
    "kind": sa.String(64),
    "master_port": sa.Integer,
    "owner": sa.String(255),
    "rank": sa.Integer,
    "retry_class": sa.String(32),
    "sha256": sa.String(64),
    "state": sa.String(32),
    "token_id": sa.String(12),
    "token_sha256": sa.String(64),
    "transport": sa.String(32),
    "uid": sa.String(64),
    "wanted_world_size": sa.Integer,
}


def _table(
    table: str, record: type, key: Collection[str], /, *more: sa.schema.SchemaItem
) -> sa.Table:
    """Return the table of `record`; `more` are further columns, constraints and indexes.

    A field of type ``X | None`` may be NULL. A type that is not in `_TYPES` is stored as JSON.
    """
    columns = []
    given = {item.name for item in more if isinstance(item, sa.Column)}
    for name, hint in get_type_hints(record).items():
        if name in given:
            continue
        is_optional = NoneType in get_args(hint)
        kind = get_args(hint)[0] if is_optional else hint
        kind = _TYPES.get(name) or _TYPES.get(kind) or _enum_or_json(kind)
        is_nullable = is_optional and name not in key
        columns.append(sa.Column(name, kind, primary_key=name in key, nullable=is_nullable))
    items = sorted([*more, *columns], key=lambda item: not isinstance(item, sa.Column))
    # SQLite would use the highest number again after its row was deleted.
    return sa.Table(table, METADATA, *items, sqlite_autoincrement="event_id" in key)


def _enum_or_json(kind: Any) -> sa.types.TypeEngine[Any]:  # noqa: ANN401
    if not (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return Json(kind)
    return sa.Enum(
        kind,
        native_enum=False,  # a new member must not need a migration
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )


def _job_id(*, is_key: bool = True) -> sa.Column[Any]:
    job = sa.ForeignKey(JOBS.c.job_id, ondelete="CASCADE")
    return sa.Column("job_id", job, primary_key=is_key, nullable=False)


JOBS: Final = _table(
    "jobs",
    Job,
    ["job_id"],
    sa.UniqueConstraint("uid"),
    sa.Index(None, "created_at", "job_id"),
    sa.Index(None, "status", "created_at"),
    sa.Index(None, "finished_at"),
)
AGENTS: Final = _table("agents", AgentRecord, ["host"], _job_id())
WORKERS: Final = _table("workers", RankRecord, ["rank"], _job_id())
ATTEMPTS: Final = _table(
    "attempts",
    Attempt,
    ["rank", "attempt"],
    _job_id(),
    sa.Index(None, "job_id", "started_at", "rank", "attempt"),
)
MEMBERS: Final = _table("members", MemberRecord, ["worker_id"], _job_id())
DEPARTURES: Final = sa.Table(
    "departures",
    METADATA,
    _job_id(),
    sa.Column("worker_id", sa.BigInteger, primary_key=True, autoincrement=False),
)
COMMITS: Final = _table("commits", CheckpointRecord, ["step"], _job_id())
EPOCHS: Final = _table("epochs", EpochDone, ["epoch"], _job_id())
SERIES: Final = _table(
    "series",
    Point,
    [],
    _job_id(is_key=False),
    sa.Column("name", sa.String(METRIC_NAME_LIMIT), nullable=False),
    # In the order of time: those who watch a job read the last points of all names.
    sa.PrimaryKeyConstraint("job_id", "at", "name"),
    sa.Index(None, "job_id", "name", "at"),
)
EVENTS: Final = _table(
    "events", Event, ["event_id"], _job_id(is_key=False), sa.Index(None, "job_id", "event_id")
)
ANSWERS: Final = sa.Table(
    "answers",
    METADATA,
    sa.Column("principal", sa.String(255), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("request_sha256", sa.String(64), nullable=False),
    sa.Column("job", Json(Job), nullable=False),
    sa.Column("created_at", UtcTime, nullable=False, index=True),
)
HOSTS: Final = _table("hosts", HostRecord, ["host"])
LEASES: Final = _table(
    "leases",
    Lease,
    [],
    sa.Column("name", sa.String(64), primary_key=True),
    # False: released; the row keeps the epoch.
    sa.Column("held", sa.Boolean, nullable=False),
)
TOKENS: Final = _table(
    "tokens", Token, ["token_id"], sa.Column("name", sa.String(63), nullable=False)
)
OUTBOX: Final = sa.Table(
    "outbox",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("has_majority", sa.Boolean, nullable=False),
    sa.Column("statements", sa.LargeBinary, nullable=False),
)
"""What each transaction did, for copies on other machines: see `database.replication`."""

IMAGE: Final = sa.Table("image", METADATA, sa.Column("id", sa.String(32), primary_key=True))
"""The id of the outbox: copies of another image have nothing in common with it."""


def current_revision(connection: sa.Connection) -> str | None:
    """Return the revision of the database's schema; None if it has no tables of Muster."""
    if not sa.inspect(connection).has_table(_VERSIONS.name):
        return None
    found: str | None = connection.scalar(sa.select(_VERSIONS.c.version_num))
    return found


def check_revision(present: str | None, place: str) -> None:
    """Raise `SchemaRefused` for a revision that this version cannot migrate."""
    if present is None or present == HEAD:
        return
    from alembic.script import ScriptDirectory  # noqa: PLC0415  see above

    scripts = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    if present not in {script.revision for script in scripts}:
        raise SchemaRefused(place, present)


def migrate(connection: sa.Connection, place: str) -> None:
    """Bring the schema to `HEAD` inside the transaction of `connection`.

    A new database gets the tables as they are now; revisions are for those of earlier releases.
    Raises what `check_revision` does, and then changes nothing.
    """
    from alembic import command  # noqa: PLC0415  see above

    present = current_revision(connection)
    check_revision(present, place)
    if present == HEAD:
        return
    config = alembic_config()
    config.attributes["connection"] = connection
    if present is None:
        METADATA.create_all(connection)
        command.stamp(config, HEAD)
    else:
        command.upgrade(config, HEAD)
        connection.execute(sa.delete(IMAGE))  # no statement says what a migration does


def alembic_config() -> "Config":
    """Return Alembic's settings; migrations/env.py reads the connection from its attributes."""
    from alembic.config import Config  # noqa: PLC0415  see above

    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config
