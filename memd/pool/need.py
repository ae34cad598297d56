"""How much of the pool a sequence takes whose pages are packed as it grows. Pure arithmetic."""

from dataclasses import dataclass

from memd.pool.layout import KVLayout
from memd.pool.packing import PackingSchedule, packing_step_tokens

MOST_CHUNK_TOKENS = 2048
LEAST_CHUNK_STEPS = 4
CHUNK_SHARE = 8  # of a pool's tokens, a chunk may be one in so many
CHUNKS_UNPACKED = 2  # one whose pages are not sealed yet, and one that is computed next


def packed_chunk_tokens(schedule: PackingSchedule, pool_tokens: int) -> int:
    """Most tokens of a prompt computed in one step: they are full until the next.

    Args:
        pool_tokens: What the pool holds in full pages.
    """
    step = packing_step_tokens(schedule.page_tokens)
    wished = min(MOST_CHUNK_TOKENS, pool_tokens // CHUNK_SHARE)
    return max(LEAST_CHUNK_STEPS, wished // step) * step


@dataclass(frozen=True)
class PackedNeed:
    """What a sequence needs of a pool, in full pages and in blocks, whoever else holds some.

    A packed block counts as the full pages that it takes the room of. A sequence is taken to share
    its packed blocks with nobody, so what several need is never more than the sum.

    Args:
        layout: Of the pool; with packed pages.
        schedule: Of the sequence.
        chunk_tokens: Most tokens computed between two packings.
    """

    layout: KVLayout
    schedule: PackingSchedule
    chunk_tokens: int

    def peak_pages(self, num_tokens: int) -> int:
        """Most full pages that a sequence takes at once until it has `num_tokens` tokens."""
        return self.further_pages(0, 0, num_tokens)

    def blocks(self, num_tokens: int) -> int:
        """Blocks that a pool needs to serve a sequence of `num_tokens` tokens."""
        return -(-self.peak_pages(num_tokens) // self.layout.pages_per_block)

    def further_pages(self, held_pages: int, held_packed_pages: int, num_tokens: int) -> int:
        """Most full pages that a sequence takes beyond those it holds.

        Args:
            held_pages: Pages it holds, of either format.
            held_packed_pages: Of those, the packed ones.
            num_tokens: What it will have at most.
        """
        per_block = self.layout.pages_per_block
        rest = self.layout.pages_for(num_tokens) - held_pages
        to_pack = len(self.schedule.packed_pages(num_tokens)) - held_packed_pages
        if to_pack <= 0:
            return max(0, rest)
        # A block is opened for the first page of it, and pages wait till it is worth opening one.
        blocks = -(-to_pack // self.layout.packed_pages_per_block)
        held_full = held_pages - held_packed_pages
        packing = self._most_full_pages - held_full + (blocks + 1) * per_block
        return max(0, min(rest + per_block, packing))

    @property
    def _most_full_pages(self) -> int:
        """Pages that are full at once: the first, the recent, those of a step, and new ones."""
        step = packing_step_tokens(self.layout.page_tokens)
        unpacked = self.schedule.recent_tokens + step + CHUNKS_UNPACKED * self.chunk_tokens
        return self.schedule.packed_pages(0).start + self.layout.pages_for(unpacked) + 1
