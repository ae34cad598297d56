"""Commands that jobs give the engine, which may be away, or go, at any moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from memd.api.errors import ApiError
from memd.jobs import JobSkipped

_AWAY = ("loading", "restarting", "draining", "failed")


@contextmanager
def skipped_without_engine() -> Iterator[None]:
    """Skip the job whose command finds no engine, or one that dies before it has answered.

    Raises:
        JobSkipped: then. Any other ApiError stays what it is.
    """
    try:
        yield
    except ApiError as error:
        if error.code not in _AWAY:
            raise
        raise JobSkipped(error.message) from None
