"""Tables and migrations say the same, and a database of another time is met with care."""

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from store import schema
from store.database import Database
from store.errors import StoreNewer
from store.tables import METADATA


def test_the_tables_are_what_the_migrations_make(fresh_url: str) -> None:
    database = Database.open(fresh_url)
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    database.close()


def test_the_known_head_is_the_newest_revision() -> None:
    directory = ScriptDirectory.from_config(schema.configuration())
    assert directory.get_current_head() == schema.HEAD


def test_a_fresh_database_is_brought_to_the_head(fresh_url: str) -> None:
    database = Database.open(fresh_url)
    with database.reading() as connection:
        assert schema.revision(connection) == schema.HEAD
    database.close()


def test_a_database_of_a_later_version_is_refused_and_left_alone(fresh_url: str) -> None:
    database = Database.open(fresh_url)
    with database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'f00d'"))
    with pytest.raises(StoreNewer, match="revision f00d, which this version of Muster does not"):
        Database.open(fresh_url)
    with database.reading() as connection:
        assert schema.revision(connection) == "f00d"
    database.close()


def test_the_sentence_about_a_later_version_tells_no_password(
    sqlite_url: str, tmp_path: Path
) -> None:
    Database.open(sqlite_url).close()
    with sqlite3.connect(tmp_path / "muster.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9'")
    connection.close()
    with pytest.raises(StoreNewer) as caught:
        Database.open(sqlite_url)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.revision == "9"
