"""What a rank reports of its training is one value in JSON.

Columns are dropped, so processes of earlier releases cannot write ranks any more.
This file is frozen: it uses plain types, because those of `database.tables` may change.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_FACTS: dict[str, sa.types.TypeEngine[Any]] = {
    "step": sa.BigInteger(),
    "total_steps": sa.BigInteger(),
    "epoch": sa.BigInteger(),
    "shard_idx": sa.BigInteger(),
    "line_idx": sa.BigInteger(),
    "loss": sa.Double(),
    "metrics": sa.Text(),  # in JSON
    "last_checkpoint_step": sa.BigInteger(),
}
_OPTIONAL = {"total_steps", "loss", "last_checkpoint_step"}
_KEY = ("job_id", "rank")
_WORKERS = sa.table("workers", *map(sa.column, [*_KEY, "progress", *_FACTS]))


def upgrade() -> None:
    op.add_column("workers", sa.Column("progress", sa.Text()))
    for row in _rows():
        loss = row.loss if row.loss is None or math.isfinite(row.loss) else None
        facts = {name: getattr(row, name) for name in _FACTS}
        facts |= {"loss": loss, "metrics": json.loads(row.metrics)}
        _update(row, {"progress": json.dumps(facts)})
    with op.batch_alter_table("workers") as workers:
        workers.alter_column("progress", existing_type=sa.Text(), nullable=False)
        for name in _FACTS:
            workers.drop_column(name)


def downgrade() -> None:
    for name, kind in _FACTS.items():
        op.add_column("workers", sa.Column(name, kind))
    for row in _rows():
        facts = json.loads(row.progress)
        _update(
            row, {name: facts[name] for name in _FACTS} | {"metrics": json.dumps(facts["metrics"])}
        )
    with op.batch_alter_table("workers") as workers:
        for name in _FACTS.keys() - _OPTIONAL:
            workers.alter_column(name, existing_type=_FACTS[name], nullable=False)
        workers.drop_column("progress")


def _rows() -> Sequence[sa.Row[Any]]:
    return op.get_bind().execute(sa.select(_WORKERS)).all()


def _update(row: sa.Row[Any], values: dict[str, object]) -> None:
    same = [_WORKERS.c[name] == getattr(row, name) for name in _KEY]
    op.get_bind().execute(sa.update(_WORKERS).where(*same).values(values))
