"""First passes of a model, so that the first request finds everything in place."""

import torch
from memd_kernels.formats import PACKED_PAGE, PackedFormat, PackedPages, view_packed

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

    Args:
        forward: See `memd.models.decoder.Decoder.forward`.
    """
    page = (layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
    kv = torch.zeros((1, 1, *page), dtype=dtype, device=device)
    packed = None if form is None else _one_page(form, layout, device)
    table, before = ([0], 0) if packed is None else ([PACKED_PAGE, 0], layout.page_tokens)
    count = layout.page_tokens

    def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    with torch.inference_mode():
        for num_decodes, offsets in ((0, range(count)), (1, [count - 1])):
            rows = numbers(*offsets, dtype=torch.int64)
            batch = ForwardBatch(
                token_ids=torch.zeros_like(rows),
                positions=rows + before,
                write_pages=torch.zeros_like(rows),
                write_offsets=rows,
                page_table=numbers(*table)[None],
                num_decodes=num_decodes,
                query_starts=numbers(0) if num_decodes else numbers(0, count),
                kv_lens=numbers(before + count),
                logits_rows=torch.zeros_like(rows[:1]),
            )
            forward(batch, kv, packed)


def _one_page(form: PackedFormat, layout: KVLayout, device: torch.device) -> PackedPages:
    size_bytes = form.page_bytes(layout.num_layers, layout.num_kv_heads)
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return view_packed(memory, form, size_bytes, layout.num_layers, layout.num_kv_heads)
