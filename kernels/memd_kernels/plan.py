"""How one decode step's attention is divided; made once a step, used by each layer.

What a kernel reads lives on the device, so that a captured graph that makes it follows the lengths
it is replayed with.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memd_kernels.launch import LaunchConfig

ITEM_FIELDS = 8
MIXED_ITEM_FIELDS = 12  # of a plan for page tables that name packed pages too
TILE_FIELDS = 3


@dataclass(frozen=True)
class PrefixPlan:
    """The part of a plan that reads shared prefixes.

    Attributes:
        row_tiles: [capacity, 3], int32; first row, rows, tokens that they share. A tile without
            rows is not used.
        splits: Parts that each shared prefix is cut into; where pages may be packed, every second
            is of packed pages.
        config: Launch of the prefix pass.
    """

    row_tiles: Tensor
    splits: int
    config: LaunchConfig


@dataclass(frozen=True)
class DecodePlan:
    """Items of nearly equal length; each program attends to one item with one KV head.

    Good for one launch at a time: programs of two launches would count in the same counters.

    Attributes:
        items: [capacity, 8], int32; row of the batch (-1: not used), first tile and end tile of
            `config.block_n` tokens, first item of the row, items of the row, end and first of the
            tokens that are read, parts of the shared prefix of the row. Sinks have items of their
            own, which begin at token 0, others after the sinks. Where pages may be packed
            [capacity, 12]: an item reads the pages of one format and passes over others; 1 for
            packed ones; for full ones the tile from which on tiles lie later, and by how many:
            where packed pages that lie together are left out; and where its part goes, as items
            are not in the order of rows.
        counters: [(rows + capacity) * num_kv_heads], int32, zeros between launches: of rows, and
            of groups of parts, at their first item.
        config: Launch of the decode kernel.
        prefix: None where no row shares a prefix.
    """

    items: Tensor
    counters: Tensor
    config: LaunchConfig
    prefix: PrefixPlan | None


@dataclass(frozen=True)
class GatherPart:
    """Decoding rows whose keys and values plain torch copies out of their pages together.

    R rows, each padded to the same number of pages.

    Attributes:
        rows: [R], int64, rows of the batch; None: all of them, in order.
        table_rows, columns: [R * pages], int64, where in the page table each page is named.
        outside: [N], int64; of the R * tokens slots that are copied, those whose token the row does
            not see: they may hold anything.
        mask: [R, 1, 1, tokens], the dtype of the keys, added to scores: -inf for these slots and
            for those that repeat a page.
        sink_slots: The first so many of a row's slots are for attention sinks.
    """

    rows: Tensor | None
    table_rows: Tensor
    columns: Tensor
    outside: Tensor
    mask: Tensor
    sink_slots: int = 0


@dataclass(frozen=True)
class GatherPlan:
    """Parts of nearly equally long rows, one after the other.

    Attributes:
        num_rows: Rows of the batch; those in no part are padding.
        max_pages: Columns that the page table has to have.
        parts: See `GatherPart`.
        scratch: Elements for the keys and values of the largest part.
    """

    num_rows: int
    max_pages: int
    parts: list[GatherPart]
    scratch: Tensor


@dataclass(frozen=True)
class RunPlan:
    """Runs of tokens that decoding rows read, each by one thread of a CPU.

    Attributes:
        num_rows: Rows of the batch; those in no run are padding.
        max_pages: Columns that the page table has to have.
        runs: [N, 3], int64, numpy; row, first token and end of each run, those of a row in order.
        memory: The KV memory, numpy.
        padded: Whether there are rows in no run.
    """

    num_rows: int
    max_pages: int
    runs: Any
    memory: Any
    padded: bool


@dataclass(frozen=True)
class ChunkPlan:
    """Decoding rows as chunks of one token each, for the kernel of prompts.

    Attributes:
        query_starts: [rows + 1], int32, as for `prefill_attention`.
        shares: By which shares are measured beside; None: they are not wanted.
    """

    query_starts: Tensor
    shares: DecodePlan | None = None


# Of a GPU, of plain torch, of a CPU, and of a GPU where batches must not matter.
AttentionPlan = DecodePlan | GatherPlan | RunPlan | ChunkPlan
