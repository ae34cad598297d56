"""First passes of a model, so that the first request finds everything in place."""

import torch
from memd_kernels.formats import PACKED_PAGE, PackedFormat

from memd.arena.arena import PageShape, view_pages
from memd.engine.packing_build import packed_view
from memd.engine.runner import Forward
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout


def warm_up(
    forward: Forward,
    layout: KVLayout,
    form: PackedFormat | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Two passes over a page of its own, behind a packed one if there is such a format.

    Blocks are as the pool will have them: kernels are compiled for the pages of one.

    Args:
        forward: See `memd.models.decoder.Decoder.forward`.
    """
    memory = torch.zeros(2 * layout.block_bytes, dtype=torch.uint8, device=device)
    shape = PageShape(layout.num_layers, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    kv = view_pages(memory, shape, layout.pages_per_block, layout.block_bytes, dtype)
    packed = packed_view(memory, form, layout)
    page = layout.pages_per_block  # the first of the second block
    table, before = ([page], 0) if packed is None else ([PACKED_PAGE, page], layout.page_tokens)
    count = layout.page_tokens

    def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    with torch.inference_mode():
        for num_decodes, offsets in ((0, range(count)), (1, [count - 1])):
            rows = numbers(*offsets, dtype=torch.int64)
            batch = ForwardBatch(
                token_ids=torch.zeros_like(rows),
                positions=rows + before,
                write_pages=torch.full_like(rows, page),
                write_offsets=rows,
                page_table=numbers(*table)[None],
                num_decodes=num_decodes,
                query_starts=numbers(0) if num_decodes else numbers(0, count),
                kv_lens=numbers(before + count),
                logits_rows=torch.zeros_like(rows[:1]),
            )
            forward(batch, kv, packed)
