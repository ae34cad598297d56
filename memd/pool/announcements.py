"""Pages that running sequences are about to write, so that others can wait for them."""

from collections.abc import Iterator

from memd.pool.keys import page_key
from memd.pool.sequence import PoolSequence


class Announcements:
    """Counts announced pages by the key of their content.

    Args:
        page_tokens: Tokens in a full page.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def follows(self, parent_key: bytes, label: bytes) -> bool:
        """Whether a page of these tokens after that content is announced."""
        return bool(self._counts) and page_key(parent_key, label) in self._counts

    def withdraw(self, key: bytes) -> None:
        """One such page has been written."""
        count = self._counts.pop(key, 0)
        if count > 1:
            self._counts[key] = count - 1

    def announce(self, sequence: PoolSequence, max_pages: int) -> list[bytes]:
        """A sequence will write the full pages that follow its sealed ones; returns their keys.

        Args:
            max_pages: Leading pages of a sequence that are published.
        """
        num_tokens = min(len(sequence.tokens), max_pages * self._page_tokens)
        keys = list(self._keys(sequence, num_tokens))
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
        sequence.announced_pages = sequence.sealed_pages + len(keys)
        return keys

    def withdraw_rest(self, sequence: PoolSequence) -> None:
        """A sequence ends: what it announced and did not write will not come."""
        for key in self._keys(sequence, sequence.announced_pages * self._page_tokens):
            self.withdraw(key)
        sequence.announced_pages = sequence.sealed_pages

    def _keys(self, sequence: PoolSequence, num_tokens: int) -> Iterator[bytes]:
        """Keys of the full pages between a sequence's sealed ones and its first `num_tokens`."""
        key = sequence.node.key
        size = self._page_tokens
        for start in range(sequence.sealed_pages * size, num_tokens - size + 1, size):
            key = page_key(key, sequence.tokens[start : start + size].tobytes())
            yield key
