"""Each page's share of its row's attention, from what the parts of decode attention leave."""

import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.plan import ITEM_FIELDS, DecodePlan

COLUMNS = 32  # pages taken together; an item of no more has one round
NUM_WARPS = 1


def add_shares(plan: DecodePlan, logs: Tensor, page_tokens: int, shares: Tensor) -> None:
    """Add to `shares` what the last launch of `decode_kernel` over a plan has found.

    Shapes:
        logs: [capacity or more, num_heads], float32; log base 2 of the sum of weights of each item.
            Items that are their row's only one have left none.
        shares: [rows, max_pages], float32, contiguous; see `decode_attention`.

    Notes:
        One program adds for a row, so the order of sums is fixed.
    """
    heads = logs.shape[1]
    _add_shares[(len(plan.items),)](
        plan.items,
        logs,
        shares,
        shares.shape[1],
        page_tokens,
        HEADS=heads,
        SIDE=launch.bucket(heads),
        TILE=plan.config.block_n,
        FIELDS=plan.items.shape[1],
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["width", "page_tokens"])
def _add_shares(
    items,
    logs,
    shares,
    width,
    page_tokens,
    HEADS: tl.constexpr,
    SIDE: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    item = tl.program_id(0)
    record = items + item * FIELDS
    row = tl.load(record)
    if row < 0:
        return
    first_item = tl.load(record + 3)
    if item != first_item:  # the program of a row's first item does the row
        return
    count = tl.load(record + 4)
    head = tl.arange(0, SIDE)
    real = head < HEADS
    largest = tl.full((SIDE,), -float("inf"), tl.float32)
    weight = tl.zeros((SIDE,), tl.float32)
    if count > 1:
        for index in range(count):
            at = logs + (first_item + index).to(tl.int64) * HEADS + head
            log = tl.load(at, mask=real, other=0.0)
            larger = tl.maximum(largest, log)
            base = tl.where(larger == -float("inf"), 0.0, larger)
            weight = weight * tl.exp2(largest - base) + tl.exp2(log - base)
            largest = larger
    for index in range(count):
        share = 1.0
        if count > 1:
            at = logs + (first_item + index).to(tl.int64) * HEADS + head
            log = tl.load(at, mask=real, other=0.0)
            found = tl.exp2(log - largest) / weight
            share = tl.sum(tl.where(real, found, 0.0), 0) / HEADS
        own = record + index * FIELDS
        begin = tl.maximum(tl.load(own + 1) * TILE, tl.load(own + 6))
        end = tl.minimum(tl.load(own + 2) * TILE, tl.load(own + 5))
        each = share / tl.maximum(end - begin, 1)
        # Two items may share a page: the same thread has to add for both, so columns are aligned.
        first = begin // page_tokens // COLUMNS * COLUMNS
        for page in range(first, tl.cdiv(end, page_tokens), COLUMNS):
            column = page + tl.arange(0, COLUMNS)
            low = tl.maximum(column * page_tokens, begin)
            tokens = tl.minimum((column + 1) * page_tokens, end) - low
            at = shares + row.to(tl.int64) * width + column
            inside = tokens > 0
            tl.store(at, tl.load(at, mask=inside, other=0.0) + each * tokens, mask=inside)


def compile_cases() -> list[CompileCase]:
    """For heads of an 8B and of a 135M model."""
    signature = {
        "items": "*i32:16",
        "logs": "*fp32:16",
        "shares": "*fp32:16",
        "width": "i32",
        "page_tokens": "i32",
    }
    sizes = {"TILE": 64, "FIELDS": ITEM_FIELDS, "COLUMNS": COLUMNS}
    return [
        CompileCase(
            _add_shares,
            signature,
            {"HEADS": heads, "SIDE": launch.bucket(heads), **sizes},
            NUM_WARPS,
        )
        for heads in (32, 9)
    ]
