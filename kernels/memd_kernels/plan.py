"""How one decode step's attention is divided among programs; made once a step, used by each layer.

Lives on the device, so that a captured graph that makes it follows the lengths it is replayed with.
"""

from dataclasses import dataclass

from torch import Tensor

from memd_kernels.launch import LaunchConfig

ITEM_FIELDS = 8
TILE_FIELDS = 3


@dataclass(frozen=True)
class PrefixPlan:
    """The part of a plan that reads shared prefixes.

    Attributes:
        row_tiles: [capacity, 3], int32; first row, rows, tokens that they share. A tile without
            rows is not used.
        splits: Parts that each shared prefix is cut into.
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
            `config.block_n` tokens, first item of the row, items of the row, length of the row in
            tokens, first token that is read, parts of the shared prefix of the row.
        counters: [rows * num_kv_heads], int32, zeros between launches.
        config: Launch of the decode kernel.
        prefix: None where no row shares a prefix.
    """

    items: Tensor
    counters: Tensor
    config: LaunchConfig
    prefix: PrefixPlan | None
