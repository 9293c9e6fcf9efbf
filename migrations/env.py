"""Alembic runs the revisions from here, in the transaction that `database.tables` has opened."""

from alembic import context

from database.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite cannot alter most of a table in place
)
with context.begin_transaction():
    context.run_migrations()
