"""Token bytes to text: incomplete characters and possible stop strings are held back."""

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Text of one sequence. Only a true prefix of a stop string or of a character is ever held.

    The stop string that is complete first ends the text, whichever token borders it crosses and
    however the text is cut into pieces; of two complete at the same character, the longer.

    Args:
        stops: Stop strings, none empty.
        include_stop: Whether the stop string itself belongs to the text.
    """

    def __init__(self, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, piece: bytes, may_stop: bool = True) -> tuple[str, bool]:
        """Add one token's bytes.

        Args:
            piece: Bytes of the token on its own.
            may_stop: False while `min_tokens` forbids an end: text passes without a look at it.

        Returns:
            Text that is certain now, and whether a stop string is complete.
        """
        text = self._held + self._decoder.decode(piece)
        self._held = ""
        if not self._stops or not may_stop:
            return text, False
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            return text[: end if self._include_stop else start], True
        held = self._prefix_at_end(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held, once no token follows; half a character becomes U+FFFD."""
        text = self._held + self._decoder.decode(b"", True)
        self._held = ""
        return text

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
