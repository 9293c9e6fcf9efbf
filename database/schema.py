"""Which schema revision a database has, and how it gets the current one.

Alembic takes half of a command's start-up time, so it is imported only when there is something to
migrate.
"""

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, column, inspect, select, table

from database.errors import SchemaTooNew
from database.tables import METADATA

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "0017"
"""The newest revision in migrations/versions; tests/unit/database/test_schema.py compares them."""

_VERSIONS: Final = table("alembic_version", column("version_num"))


def current_revision(connection: Connection) -> str | None:
    """Return the revision of the database's schema; None if it has no tables of Muster."""
    if not inspect(connection).has_table(_VERSIONS.name):
        return None
    found: str | None = connection.scalar(select(_VERSIONS.c.version_num))
    return found


def migrate(connection: Connection, place: str) -> None:
    """Bring the schema to `HEAD` inside the transaction of `connection`.

    A new database gets the tables as they are now; revisions are for those of earlier releases.
    Raises `SchemaTooNew`, and changes nothing, if its revision is unknown to this version.
    """
    from alembic import command  # noqa: PLC0415  see above
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    present = current_revision(connection)
    if present == HEAD:
        return
    config = alembic_config()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if present is not None and present not in known:
        raise SchemaTooNew(place, present)
    config.attributes["connection"] = connection
    if present is None:
        METADATA.create_all(connection)
        command.stamp(config, HEAD)
    else:
        command.upgrade(config, HEAD)


def alembic_config() -> "Config":
    """Return Alembic's settings; migrations/env.py reads the connection from its attributes."""
    from alembic.config import Config  # noqa: PLC0415  see above

    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config
