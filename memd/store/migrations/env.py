"""Run by Alembic: migrations go through the connection, and the transaction, of the caller."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
