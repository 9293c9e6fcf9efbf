"""The head of the migrations, and databases that this version refuses."""

from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, make_url, text

from database import HEAD, tables
from database.engine import Database
from database.errors import SchemaRefused

TABLES_OF_0_1_0 = Path(__file__).with_name("first_release.sql").read_text()
TYPES = {
    "sqlite": {"number": "DOUBLE", "event_id": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT"},
    "postgresql": {"number": "DOUBLE PRECISION", "event_id": "BIGSERIAL NOT NULL PRIMARY KEY"},
}


def test_the_head_is_the_newest_revision() -> None:
    directory = ScriptDirectory.from_config(tables.alembic_config())
    assert directory.get_current_head() == HEAD


def test_tables_and_migrations_agree(fresh_url: str) -> None:
    url = make_url(fresh_url)
    driver = "postgresql+psycopg" if url.drivername.startswith("postgresql") else "sqlite"
    engine = create_engine(url.set(drivername=driver))
    with engine.begin() as connection:
        statements = TABLES_OF_0_1_0.format(**TYPES[connection.dialect.name])
        for statement in statements.split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
        config = tables.alembic_config()
        config.attributes["connection"] = connection
        command.stamp(config, "r0001")
    engine.dispose()
    with closing(Database.open(fresh_url)) as migrated, migrated.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, tables.METADATA) == []


@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("f00d", "revision f00d, which this version"),
        ("r9999", "revision r9999, which this version"),
        ("0001", "was made by a build before 0.1.0: end its jobs with that build"),
        ("0017", "was made by a build before 0.1.0: end its jobs with that build"),
    ],
)
def test_another_schema_is_refused_and_left_alone(
    fresh_url: str, revision: str, words: str
) -> None:
    with closing(Database.open(fresh_url)) as database:
        with database.writing() as connection:
            connection.execute(
                text("UPDATE alembic_version SET version_num = :it"), {"it": revision}
            )
        with pytest.raises(SchemaRefused, match=words) as caught:
            Database.open(fresh_url)
        assert caught.value.revision == database.revision() == revision
