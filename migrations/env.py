"""What Alembic runs: the revisions, inside the transaction that `store.schema` has opened."""

from alembic import context

from store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite cannot alter most of a table in place
)
with context.begin_transaction():
    context.run_migrations()
