"""The head of the migrations, and databases of later releases."""

from contextlib import closing

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import text

from database import schema
from database.engine import Database
from database.errors import SchemaTooNew


def test_the_head_is_the_newest_revision() -> None:
    directory = ScriptDirectory.from_config(schema.alembic_config())
    assert directory.get_current_head() == schema.HEAD


def test_a_later_schema_is_refused_and_left_alone(fresh_url: str) -> None:
    with closing(Database.open(fresh_url)) as database:
        with database.writing() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = 'f00d'"))
        with pytest.raises(SchemaTooNew, match="revision f00d, which this version") as caught:
            Database.open(fresh_url)
        assert caught.value.revision == database.revision() == "f00d"
