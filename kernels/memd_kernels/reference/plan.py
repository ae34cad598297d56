"""Which decoding rows plain torch takes together, and where their keys and values are found."""

from collections.abc import Iterator

import torch
from torch import Tensor

from memd_kernels.formats import PackedPages
from memd_kernels.plan import AttentionPlan, GatherPart, GatherPlan
from memd_kernels.sinks import check_sink_count

ALIKE_PAGES = 4  # decoding sequences are padded to a multiple of so many pages
SCRATCH_BYTES = 16 * 2**20


def plan_decode(
    kv_lens: Tensor,
    kv: Tensor,
    num_heads: int,
    window: int | None,
    groups: Tensor | None = None,
    sinks: int = 0,
    page_table: Tensor | None = None,
    packed: PackedPages | None = None,
    shares: bool = False,
) -> AttentionPlan:
    """Divide decode attention; the plan holds for all layers of a step.

    Here sequences that are about as long are taken together. How far a sequence is padded depends
    on its length alone, and so does its result: not on what else is in the batch.

    Shapes:
        kv_lens: [B], int32, lengths in tokens with the new token; 0: a row of padding.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        num_heads: query heads.
        window: tokens that a token sees, itself included; None: all.
        groups: as for `shared_prefix_attention`; None: no rows share pages.
        sinks: leading tokens seen besides the window; see `Sinks`.
        page_table, packed: as for `decode_attention`, which is given the same; None: all pages are
            full.
        shares: it will be asked for shares, so parts are short; needs the page table.

    Raises:
        ValueError: a shape, dtype or length does not match the above.
    """
    return gather_plan(kv_lens, kv, window, sinks)


def gather_plan(kv_lens: Tensor, kv: Tensor, window: int | None, sinks: int = 0) -> GatherPlan:
    """`plan_decode`, which is the same for any number of query heads."""
    lengths = read_lens(kv_lens, window)
    check_sink_count(sinks, window)
    parts = [
        _part(rows, spans, kv, len(lengths), sinks)
        for rows, spans in _alike(lengths, window, kv, sinks)
    ]
    page_numel = 2 * kv.shape[4] * kv.shape[5] * kv.shape[6]
    most_pages = max((len(part.columns) for part in parts), default=0)
    return GatherPlan(
        num_rows=len(lengths),
        max_pages=-(-max(lengths, default=0) // kv.shape[5]),
        parts=parts,
        scratch=kv.new_empty(most_pages * page_numel),
    )


def first_seen(position: int, window: int | None) -> int:
    """The first token that the one at a position sees."""
    return 0 if window is None else max(0, position + 1 - window)


def read_lens(kv_lens: Tensor, window: int | None) -> list[int]:
    """The lengths as numbers; ValueError where they or the window are not what attention takes."""
    if kv_lens.ndim != 1 or kv_lens.dtype != torch.int32:
        raise ValueError(f"kv_lens is {tuple(kv_lens.shape)} {kv_lens.dtype}, not int32 of [rows]")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself, so at least 1")
    lengths: list[int] = kv_lens.tolist()
    if lengths and min(lengths) < 0:
        raise ValueError(f"kv_lens has {min(lengths)}; a length is at least 0")
    return lengths


def _alike(
    lengths: list[int], window: int | None, kv: Tensor, sinks: int
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Rows that read about as many pages, with the tokens [start, stop) that each sees, sinks
    aside.
    """
    page_tokens = kv.shape[5]
    step = ALIKE_PAGES * page_tokens
    alike: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            first = max(first_seen(length - 1, window), min(sinks, length - 1))
            first = first // page_tokens * page_tokens
            alike.setdefault(-(-(length - first) // step) * step, []).append(row)
    for tokens, rows in alike.items():
        most = max(SCRATCH_BYTES // (2 * kv.shape[4] * tokens * kv.shape[6] * kv.itemsize), 1)
        for index in range(0, len(rows), most):
            part = rows[index : index + most]
            yield (
                part,
                [(max(first_seen(lengths[row] - 1, window), sinks), lengths[row]) for row in part],
            )


def _part(
    rows: list[int], spans: list[tuple[int, int]], kv: Tensor, num_rows: int, sinks: int
) -> GatherPart:
    page_tokens, device = kv.shape[5], kv.device
    start, stop = torch.tensor(spans, device=device).T[:, :, None]
    last = (stop + page_tokens - 1) // page_tokens
    first = torch.minimum(start // page_tokens, last - 1)
    count = int((last - first).max())
    count = -(-count // ALIKE_PAGES) * ALIKE_PAGES
    columns = first + torch.arange(count, device=device)
    padding = columns >= last
    # Repeats a page before the last where there is one: nothing of it has to be cleared.
    columns = torch.where(padding, torch.maximum(first, last - 2), columns)
    tokens = columns[:, :, None] * page_tokens + torch.arange(page_tokens, device=device)
    outside = (tokens < start[:, :, None]) | (tokens >= stop[:, :, None])
    outside, hidden = outside.flatten(1), (outside | padding[:, :, None]).flatten(1)
    sink_pages = -(-sinks // page_tokens)
    if sinks:
        beyond = torch.arange(sink_pages * page_tokens, device=device) >= stop.clamp(max=sinks)
        leading = torch.arange(sink_pages, device=device)
        columns = torch.cat((torch.minimum(leading, last - 1), columns), 1)
        outside, hidden = torch.cat((beyond, outside), 1), torch.cat((beyond, hidden), 1)
    hidden = hidden[:, None, None]
    mask = torch.zeros(hidden.shape, dtype=kv.dtype, device=device)
    index = torch.tensor(rows, device=device)
    return GatherPart(
        rows=None if len(rows) == num_rows else index,
        table_rows=index.repeat_interleave(columns.shape[1]),
        columns=columns.flatten(),
        outside=outside.flatten().nonzero().squeeze(1),
        mask=mask.masked_fill_(hidden, -torch.inf),
        sink_slots=sink_pages * page_tokens,
    )
