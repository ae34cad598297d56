"""Bytes that the KV of one sequence takes, from the layout alone: no model is needed. Pure."""

from dataclasses import dataclass

from memd.evaluate.policy import KVPolicy
from memd.pool.layout import KVLayout


@dataclass(frozen=True)
class Footprint:
    """Memory of one sequence's KV.

    Args:
        full_pages: Pages in the model's dtype, the last, partly filled one included.
        packed_pages: Packed pages, scales inside.
        kv_bytes: Of these pages.
        committed_bytes: Of the blocks that hold them, where nothing else is in the pool.
    """

    full_pages: int
    packed_pages: int
    kv_bytes: int
    committed_bytes: int

    @property
    def used_share(self) -> float:
        """Share of the committed bytes that pages take."""
        return self.kv_bytes / self.committed_bytes


def footprint(layout: KVLayout, policy: KVPolicy, num_tokens: int) -> Footprint:
    """Memory of a sequence of `num_tokens` tokens, at least 1.

    Args:
        layout: With the size of a packed page if the policy packs pages.

    Raises:
        ValueError: the policy packs pages, and the layout has none.
    """
    packed = len(policy.packed_pages(layout.page_tokens, num_tokens))
    full = len(policy.held_pages(layout.page_tokens, num_tokens)) - packed
    if packed and layout.packed_page_bytes is None:
        raise ValueError(f"the layout has no size of {policy.kv} pages")
    blocks = -(-full // layout.pages_per_block)
    if packed:
        blocks += -(-packed // layout.packed_pages_per_block)
    return Footprint(
        full_pages=full,
        packed_pages=packed,
        kv_bytes=full * layout.page_bytes + packed * (layout.packed_page_bytes or 0),
        committed_bytes=blocks * layout.block_bytes,
    )
