"""All byte arithmetic of pages and blocks. Pure; used by pool, arena, runner and `memd plan`."""

from dataclasses import dataclass

from memd.types import PACKED_PAGE, BlockId, PageId

MOST_WASTE = 0.03  # share of a block, where blocks have to suit pages of two sizes


@dataclass(frozen=True)
class KVLayout:
    """How the KV of one model lies in blocks and pages.

    A page is `[layer][K|V][kv head][token][head dim]`, contiguous. A block holds `pages_per_block`
    pages from its start; what no page fills is at its end. Where pages are packed, a block may
    instead hold `packed_pages_per_block` packed pages, of `packed_page_bytes` each.

    Ids of pages are the same in both formats: `block * slots_per_block + index`, where the index is
    below the number of pages that a block of that format holds.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    page_tokens: int
    block_bytes: int
    packed_page_bytes: int | None = None

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
    def packed_pages_per_block(self) -> int:
        """Packed pages that one block holds; 0 where pages are not packed."""
        return self.block_bytes // self.packed_page_bytes if self.packed_page_bytes else 0

    @property
    def slots_per_block(self) -> int:
        """Page ids of one block: as many as it holds pages of the smaller format."""
        return max(self.pages_per_block, self.packed_pages_per_block)

    @property
    def waste_bytes(self) -> int:
        """Bytes at the end of each block that no page fills."""
        return self.block_bytes - self.pages_per_block * self.page_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_tokens)

    def size_bytes(self, packed: bool) -> int:
        """Bytes of one page of a format."""
        return (self.packed_page_bytes or 0) if packed else self.page_bytes

    def block_of(self, page: PageId) -> BlockId:
        """The block a page lies in."""
        return BlockId(page // self.slots_per_block)

    def page_offset_bytes(self, page: PageId, packed: bool = False) -> int:
        """Where a page of a format begins, from the start of the arena."""
        block, index = divmod(page, self.slots_per_block)
        return block * self.block_bytes + index * self.size_bytes(packed)

    def table_entry(self, page: PageId, packed: bool) -> int:
        """What the kernels' page tables hold for a page: its number among those of its format."""
        block, index = divmod(page, self.slots_per_block)
        if packed:
            return PACKED_PAGE | (block * self.packed_pages_per_block + index)
        return block * self.pages_per_block + index


def choose_block_bytes(
    page_bytes: int, granule_bytes: int, target_bytes: int, packed_page_bytes: int | None = None
) -> int:
    """The block size near the target that leaves least over.

    Considers whole granules within a quarter of the target and takes the least share of waste, then
    the size nearest the target. A page larger than that gets blocks of one page each.

    Blocks that may hold packed pages instead have to suit both sizes of page, which few do: a
    packed page is no simple fraction of a full one. They may be up to four times the target, or
    four pages if that is more, and the size nearest the target is taken at which neither format
    wastes more than `MOST_WASTE`; where there is none, the one at which the worse wastes least.

    Args:
        page_bytes: Size of a page.
        granule_bytes: The driver's unit of memory; a block is a multiple of it.
        target_bytes: The size wished for, such as 16 MiB.
        packed_page_bytes: Size of a packed page, less than that of a page; None: there are none.
    """
    lowest = max(-(-(target_bytes * 3 // 4) // granule_bytes), -(-page_bytes // granule_bytes))
    if packed_page_bytes is None:
        highest = max(target_bytes * 5 // 4 // granule_bytes, lowest)
        sizes = range(lowest * granule_bytes, highest * granule_bytes + 1, granule_bytes)
        return min(sizes, key=lambda size: (size % page_bytes / size, abs(size - target_bytes)))
    highest = max(4 * max(target_bytes, page_bytes) // granule_bytes, lowest)
    wasted = {
        size: max(size % page_bytes, size % packed_page_bytes) / size
        for size in range(lowest * granule_bytes, highest * granule_bytes + 1, granule_bytes)
    }
    fitting = [size for size, waste in wasted.items() if waste <= MOST_WASTE]
    if fitting:
        return min(fitting, key=lambda size: abs(size - target_bytes))
    return min(wasted, key=lambda size: (wasted[size], size))


def plan_layout(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    page_tokens: int,
    granule_bytes: int,
    target_block_bytes: int,
    packed_page_bytes: int | None = None,
) -> KVLayout:
    """The layout for a model on a device; see `choose_block_bytes`."""
    page_bytes = num_layers * 2 * num_kv_heads * head_dim * element_bytes * page_tokens
    block_bytes = choose_block_bytes(
        page_bytes, granule_bytes, target_block_bytes, packed_page_bytes
    )
    return KVLayout(
        num_layers,
        num_kv_heads,
        head_dim,
        element_bytes,
        page_tokens,
        block_bytes,
        packed_page_bytes,
    )
