"""The points of what jobs report from step to step."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "series",
        sa.Column("job_id", sa.String(63), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Double()) for name in ("first", "least", "greatest", "last")),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("count", "not_finite", "since", "step")
        ),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.job_id"], name="fk_series_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "at", "name", name="pk_series"),
    )
    op.create_index("ix_series_job_id_name_at", "series", ["job_id", "name", "at"])
