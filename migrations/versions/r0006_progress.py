"""What a rank reports of its training is one value in JSON.

Columns are dropped, so processes of earlier releases cannot write ranks any more.
This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import json
import math

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_FACTS = (
    "step",
    "total_steps",
    "epoch",
    "shard_idx",
    "line_idx",
    "loss",
    "metrics",  # in JSON
    "last_checkpoint_step",
)
_WORKERS = sa.table("workers", *map(sa.column, ["job_id", "rank", "progress", *_FACTS]))


def upgrade() -> None:
    op.add_column("workers", sa.Column("progress", sa.Text()))
    connection, key = op.get_bind(), (_WORKERS.c.job_id, _WORKERS.c.rank)
    for row in connection.execute(sa.select(_WORKERS)).all():
        loss = row.loss if row.loss is None or math.isfinite(row.loss) else None
        facts = {name: getattr(row, name) for name in _FACTS}
        facts |= {"loss": loss, "metrics": json.loads(row.metrics)}
        same = [column == getattr(row, column.name) for column in key]
        progress = {"progress": json.dumps(facts)}
        connection.execute(sa.update(_WORKERS).where(*same).values(progress))
    with op.batch_alter_table("workers") as workers:
        workers.alter_column("progress", existing_type=sa.Text(), nullable=False)
        for name in _FACTS:
            workers.drop_column(name)
