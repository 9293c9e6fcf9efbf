"""An index by the end of jobs: metrics show those that ended lately, of any number."""

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"])
