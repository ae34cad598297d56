"""All byte arithmetic of pages and blocks. Pure; used by pool, arena, runner and `memd plan`."""

from dataclasses import dataclass

from memd.types import BlockId, PageId


@dataclass(frozen=True)
class KVLayout:
    """How the KV of one model lies in blocks and pages.

    A page is `[layer][K|V][kv head][token][head dim]`, contiguous. A block holds `pages_per_block`
    pages from its start; what no page fills is at its end.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    page_tokens: int
    block_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.token_bytes * self.page_tokens

    @property
    def pages_per_block(self) -> int:
        """Pages that one block holds; at least 1."""
        return self.block_bytes // self.page_bytes

    @property
    def waste_bytes(self) -> int:
        """Bytes at the end of each block that no page fills."""
        return self.block_bytes - self.pages_per_block * self.page_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_tokens)

    def block_of(self, page: PageId) -> BlockId:
        """The block a page lies in."""
        return BlockId(page // self.pages_per_block)

    def page_offset_bytes(self, page: PageId) -> int:
        """Where a page begins, from the start of the arena."""
        block, index = divmod(page, self.pages_per_block)
        return block * self.block_bytes + index * self.page_bytes


def choose_block_bytes(page_bytes: int, granule_bytes: int, target_bytes: int) -> int:
    """The block size near the target that leaves least over.

    Considers whole granules within a quarter of the target and takes the least share of waste, then
    the size nearest the target. A page larger than that gets blocks of one page each.

    Args:
        page_bytes: Size of a page.
        granule_bytes: The driver's unit of memory; a block is a multiple of it.
        target_bytes: The size wished for, such as 16 MiB.
    """
    lowest = max(-(-(target_bytes * 3 // 4) // granule_bytes), -(-page_bytes // granule_bytes))
    highest = max(target_bytes * 5 // 4 // granule_bytes, lowest)
    sizes = (count * granule_bytes for count in range(lowest, highest + 1))
    return min(sizes, key=lambda size: (size % page_bytes / size, abs(size - target_bytes)))


def plan_layout(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    page_tokens: int,
    granule_bytes: int,
    target_block_bytes: int,
) -> KVLayout:
    """The layout for a model on a device; see `choose_block_bytes`."""
    page_bytes = num_layers * 2 * num_kv_heads * head_dim * element_bytes * page_tokens
    block_bytes = choose_block_bytes(page_bytes, granule_bytes, target_block_bytes)
    return KVLayout(num_layers, num_kv_heads, head_dim, element_bytes, page_tokens, block_bytes)
