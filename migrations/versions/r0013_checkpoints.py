"""A job does not rely on a shared directory any more: hosts without it send their checkpoints."""

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.drop_column("jobs", "shared_hosts")
