"""The schema of 0.1.0, where every upgrade begins: there is nothing to do."""

revision = "r0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: `database.tables` creates the tables of a new database as they are now."""
