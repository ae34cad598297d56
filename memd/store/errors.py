"""What can be wrong with the database, in words that hold no secret."""

from sqlalchemy.exc import DBAPIError, OperationalError

from memd.errors import MemdError

_NO_SUCH_TABLE = "42P01"  # somebody has emptied the database; it is filled again
_LIMIT_EXCEEDED = "54"


class StoreError(MemdError):
    """The database cannot be read or written now, or is not one that memd can use."""


class SchemaError(StoreError):
    """The database was made by a memd newer than this one."""


def cause(error: Exception) -> str:
    """The driver's words, on one line. SQLAlchemy's own would repeat statement and values."""
    words = error.orig if isinstance(error, DBAPIError) else error
    text = " ".join(str(words).split()) or type(error).__name__
    kind = getattr(words, "sqlite_errorname", None)
    return text if kind is None else f"{text} ({kind})"


def passes(error: Exception) -> bool:
    """Whether it may work later: the database is locked, full or gone. Else a row is at fault."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, StoreError | OSError)
    state = getattr(error.orig, "sqlstate", None) or ""  # PostgreSQL's; of SQLite there is none
    if error.connection_invalidated or state == _NO_SUCH_TABLE:
        return True
    return isinstance(error, OperationalError) and not state.startswith(_LIMIT_EXCEEDED)
