"""Whether the database has the tables this version knows, and how it gets them.

Opening a database of today must be quick, so Alembic is imported only when there is something to
migrate.
"""

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, column, inspect, select, table

from store.errors import StoreNewer

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "0005"
"""The newest revision in migrations/versions; a test holds the two together."""

_VERSIONS: Final = table("alembic_version", column("version_num"))


def revision(connection: Connection) -> str | None:
    """Return the revision of the database's schema; None where Muster has never been."""
    if not inspect(connection).has_table(_VERSIONS.name):
        return None
    found: str | None = connection.scalar(select(_VERSIONS.c.version_num))
    return found


def migrate(connection: Connection, place: str) -> None:
    """Bring the schema to `HEAD` inside the transaction of `connection`.

    Raises `StoreNewer`, and changes nothing, if its revision is none of ours.
    """
    # Half of a command's start-up time, and nearly always there is nothing to do.
    from alembic import command  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    present = revision(connection)
    if present == HEAD:
        return
    config = configuration()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if present is not None and present not in known:
        raise StoreNewer(place, present)
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)


def configuration() -> "Config":
    """Return Alembic's settings; migrations/env.py reads the connection from its attributes."""
    from alembic.config import Config  # noqa: PLC0415  see `migrate`

    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config
