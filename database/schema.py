"""Which schema revision a database has, and how it gets the current one.

Alembic takes half of a command's start-up time, so it is imported only when there is something to
migrate.
"""

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, column, inspect, select, table

from database.errors import SchemaRefused
from database.tables import METADATA

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "r0001"
"""The newest revision in migrations/versions; tests/unit/database/test_schema.py compares them."""

_VERSIONS: Final = table("alembic_version", column("version_num"))


def current_revision(connection: Connection) -> str | None:
    """Return the revision of the database's schema; None if it has no tables of Muster."""
    if not inspect(connection).has_table(_VERSIONS.name):
        return None
    found: str | None = connection.scalar(select(_VERSIONS.c.version_num))
    return found


def check_revision(present: str | None, place: str) -> None:
    """Raise `SchemaRefused` for a revision that this version cannot migrate."""
    if present is None or present == HEAD:
        return
    from alembic.script import ScriptDirectory  # noqa: PLC0415  see above

    scripts = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    if present not in {script.revision for script in scripts}:
        raise SchemaRefused(place, present)


def migrate(connection: Connection, place: str) -> None:
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


def alembic_config() -> "Config":
    """Return Alembic's settings; migrations/env.py reads the connection from its attributes."""
    from alembic.config import Config  # noqa: PLC0415  see above

    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config
