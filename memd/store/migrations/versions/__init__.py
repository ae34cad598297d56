"""Applied by Alembic; see `memd.store.schema`."""
