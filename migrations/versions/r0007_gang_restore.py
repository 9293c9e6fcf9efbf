"""From which checkpoint the present attempts of a gang go on."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("restore_from", sa.Text()))
