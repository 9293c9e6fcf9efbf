"""The schema of the first release, where every upgrade begins: there is nothing to do."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: `database.schema` creates the tables of a new database as they are now."""
