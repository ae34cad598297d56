"""The last lines of the log, in memory, for the support bundle."""

import logging
from collections import deque

LINES = 2000
LINE_CHARACTERS = 2000


class LogTail(logging.Handler):
    """Keeps what is logged lately.

    Args:
        lines: How many records.
    """

    def __init__(self, lines: int = LINES) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._lines: deque[str] = deque(maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; a long one is cut."""
        try:
            self._lines.append(self.format(record)[:LINE_CHARACTERS])
        except Exception:
            self.handleError(record)

    @property
    def text(self) -> str:
        """Oldest first."""
        return "\n".join([*self._lines, ""])
