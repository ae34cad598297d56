"""The schema: which one a database has, and the way to the newest."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from memd.store.errors import SchemaError

REVISIONS = ("0001", "0002", "0003", "0004")  # oldest first; a test holds them against the files
HEAD = REVISIONS[-1]
_MIGRATIONS = Path(__file__).parent / "migrations"


def revision_of(connection: Connection) -> str | None:
    """The schema that a database has; None: it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def check(connection: Connection) -> str | None:
    """Like `revision_of`, of a database that this memd can use or upgrade.

    Raises:
        SchemaError: a newer memd made it.
    """
    found = revision_of(connection)
    if found is not None and found not in REVISIONS:
        raise SchemaError(
            f"the database has the schema {found}, this memd knows those up to {HEAD}: run the "
            "memd that made it, or name another database with history.url"
        )
    return found


def upgrade(connection: Connection, to: str = HEAD) -> str | None:
    """Bring a database to a schema, in the connection's transaction: wholly or not at all.

    Args:
        connection: With a transaction begun; on SQLite one that holds the write lock.
        to: One of REVISIONS, not older than the database's.

    Returns:
        The schema it had before.

    Raises:
        SchemaError: a newer memd made it.
    """
    found = check(connection)
    if found != to:
        # Takes 60 ms to import, which a database that is up to date need not wait for.
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, to)
    return found
