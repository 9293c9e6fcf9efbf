"""What a coordinator needs to adopt living ranks: their port, and what each of them has counted.

What is here is frozen: it names plain types, never those of `store.columns`, which may change.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The defaults also serve processes of the release before, which name no such columns.
    op.add_column(
        "jobs", sa.Column("master_port", sa.Integer(), nullable=False, server_default="0")
    )
    op.add_column(
        "workers",
        sa.Column("checkpoints_before", sa.BigInteger(), nullable=False, server_default="0"),
    )


def downgrade() -> None:
    with op.batch_alter_table("workers") as workers:
        workers.drop_column("checkpoints_before")
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("master_port")
