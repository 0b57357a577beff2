"""Run by Alembic, always over a connection that :mod:`semel.db.migrate` opened, inside its transaction."""

from alembic import context

from semel.db.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
