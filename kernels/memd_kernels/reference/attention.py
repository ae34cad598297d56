"""Causal attention of new tokens over the pages of their sequences.

Lengths differ widely, so one padded batch would read and compute mostly padding: prefill goes
through the sequences one at a time, decoding takes those together that are about as long. What a
sequence gets does not depend on what else is in the batch, but for rounding where torch divides a
row's keys among several threads. A scratch holds keys and values of what is computed together, and
stays in the processor's cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memd_kernels.formats import PackedPages
from memd_kernels.plan import AttentionPlan, GatherPart, GatherPlan, RunPlan
from memd_kernels.reference.masks import QUERY_TILE, causal_mask, sink_mask
from memd_kernels.reference.packed import find_packed, read_packed
from memd_kernels.reference.pages import check_kv, layer_pages, page_rows
from memd_kernels.reference.plan import first_seen, gather_plan, read_lens
from memd_kernels.sinks import Sinks, check_sinks


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
    shares: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the last token of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [B, num_heads, head_dim], rotated, the dtype of `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        page_table: [B, max_pages], int32; entries past a sequence's pages are not read. One with
            `PACKED_PAGE` set names a packed page.
        kv_lens: [B], int32, lengths in tokens with the new token; 0: a row of padding.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all.
        plan: `plan_decode` of the same lengths, window and number of sinks, to divide the work once
            for all layers; with packed pages, of the same page table too.
        sinks: leading tokens seen besides the window; None: none.
        packed: packed pages that the page table may name; None: it names full ones only.
        shares: [B, max_pages], float32, contiguous; the share of each page of the table in its
            row's attention, the mean of the heads, is added to it. Here exactly; where attention is
            divided, a part's share is divided by tokens among its pages. None: not wanted.
        out: as what is returned, contiguous: results go there. None: a tensor of their own.

    Returns:
        [B, num_heads, head_dim], the dtype of `q`; zeros in rows of padding. Softmax and sums are
        in float32.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above, or the page table
            names a page that is not there.
    """
    check_kv(kv, layer, q)
    count = check_sinks(sinks, q, window)
    check_shares(shares, page_table)
    check_out(out, q)
    if not isinstance(plan, GatherPlan):
        plan = gather_plan(kv_lens, kv, window, count)
    check_plan(plan, q, page_table, kv_lens)
    # The query heads of one KV head become rows of one matrix: its keys are read once for them all.
    grouped = q.unflatten(1, (kv.shape[4], -1))
    output = torch.zeros(grouped.shape, dtype=q.dtype, device=q.device)
    for part in plan.parts:
        keys, values = _gather(kv, layer, page_table, part, plan.scratch, packed)
        queries = grouped if part.rows is None else grouped[part.rows]
        if sinks is None and shares is None:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=part.mask, scale=scale
            )
        else:
            turned = q if sinks is None else sinks.q
            turned = turned.unflatten(1, (kv.shape[4], -1))
            turned = turned if part.rows is None else turned[part.rows]
            weights = _weights(turned, queries, keys, part.sink_slots, part.mask, scale)
            attended = (weights @ values.to(weights.dtype)).to(q.dtype)
            if shares is not None:
                found = weights.mean((1, 2)).view(-1, kv.shape[5]).sum(1)  # of pages, in order
                where = part.table_rows * shares.shape[1] + part.columns
                shares.view(-1).index_add_(0, where, found.float())
        output = attended if part.rows is None else output.index_copy_(0, part.rows, attended)
    output = output.reshape(q.shape)
    return output if out is None else out.copy_(output)


def shared_prefix_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    groups: Tensor,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
) -> Tensor:
    """`decode_attention` for groups of sequences whose page tables begin with the same pages.

    The result is that of `decode_attention`; where a kernel makes use of the groups, each shared
    page is read once for a group.

    Shapes:
        q, kv, layer, page_table, kv_lens, scale, window, sinks, packed: as for `decode_attention`.
        groups: [capacity, 3], int32; first row, number of rows and number of shared pages, full
            ones, of each group. A number of rows or pages of 0: not used. Groups do not overlap,
            and each of their rows is longer than what it shares.
        plan: `plan_decode` of the same lengths, window, groups and number of sinks.

    Returns:
        [B, num_heads, head_dim], the dtype of `q`; zeros in rows of padding.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above.
    """
    check_groups(groups)
    return decode_attention(q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [T, num_heads, head_dim], rotated, the dtype of `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        page_table: [S, max_pages], int32; entries past a sequence's pages are not read. One with
            `PACKED_PAGE` set names a packed page.
        query_starts: [S + 1], int32, ascending row numbers; sequence i owns rows
            `query_starts[i]:query_starts[i + 1]`, its last tokens. Rows past the last are padding.
        kv_lens: [S], int32, lengths in tokens with the new tokens; 0: its rows are padding.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all.
        sinks: leading tokens seen besides the window; None: none.
        packed: packed pages that the page table may name; None: it names full ones only.
        out: as what is returned, contiguous: results go there. None: a tensor of their own.

    Returns:
        [T, num_heads, head_dim], the dtype of `q`; zeros in rows of padding. Rows before the first
        sequence's are not written. Softmax and sums are in float32.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above, or the page table
            names a page that is not there.
    """
    check_kv(kv, layer, q)
    count = check_sinks(sinks, q, window)
    check_out(out, q)
    lengths = read_lens(kv_lens, window)
    _check_table(page_table, kv_lens, -(-max(lengths, default=0) // kv.shape[5]))
    starts = _check_starts(q.shape[0], query_starts, lengths)
    reader = _PageReader(kv, layer, page_table, lengths, packed)
    group = q.shape[1] // kv.shape[4]
    grouped = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [num_kv_heads, group, T, head_dim]
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    grouped_output = output.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    output[starts[-1] :] = 0
    turned = None if sinks is None else sinks.q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    mask = causal_mask(max(lengths, default=0), window, q)
    for row, length in enumerate(lengths):
        start, stop = starts[row], starts[row + 1]
        if length == 0:
            output[start:stop] = 0
        if start == stop or length == 0:
            continue
        first_position = length - (stop - start)
        leading = min(count, length)
        seen = max(first_seen(first_position, window), leading)
        keys, values = (
            part.transpose(0, 1).expand(-1, group, -1, -1)
            for part in reader.read(row, leading, seen, length)
        )
        for tile in range(start, stop, QUERY_TILE):
            tile_stop = min(tile + QUERY_TILE, stop)
            position = first_position + tile - start
            low, high = first_seen(position, window), position + tile_stop - tile
            if turned is not None:
                low = min(max(low, leading), high)
                shown = [*range(leading), *range(low - seen + leading, high - seen + leading)]
                weights = _weights(
                    turned[:, :, tile:tile_stop],
                    grouped[:, :, tile:tile_stop],
                    keys[:, :, shown],
                    leading,
                    sink_mask(position, leading, low, high, window, q),
                    scale,
                )
                attended = weights @ values[:, :, shown].to(weights.dtype)
                grouped_output[:, :, tile:tile_stop] = attended.to(q.dtype)
                continue
            grouped_output[:, :, tile:tile_stop] = F.scaled_dot_product_attention(
                grouped[:, :, tile:tile_stop],
                keys[:, :, low - seen : high - seen],
                values[:, :, low - seen : high - seen],
                attn_mask=mask[tile - tile_stop :, low - high :],
                scale=scale,
            )
    return output


def check_plan(plan: GatherPlan | RunPlan, q: Tensor, page_table: Tensor, kv_lens: Tensor) -> None:
    """Raise ValueError where a plan is of other rows, or the page table too narrow for it."""
    if not plan.num_rows == len(kv_lens) == len(q):
        raise ValueError(
            f"kv_lens has {len(kv_lens)} lengths and plan {plan.num_rows} for {len(q)} rows of q"
        )
    _check_table(page_table, kv_lens, plan.max_pages)


def check_groups(groups: Tensor) -> None:
    """Raise ValueError where groups are not what `shared_prefix_attention` takes."""
    if groups.ndim != 2 or groups.shape[1] != 3 or groups.dtype != torch.int32:
        raise ValueError(
            f"groups is {tuple(groups.shape)} {groups.dtype}, not int32 of [capacity, 3]"
        )


def check_out(out: Tensor | None, q: Tensor) -> None:
    """Raise ValueError where `out` is not what attention with `q` can be written to."""
    if out is None:
        return
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, not contiguous "
            f"{q.dtype} of {tuple(q.shape)}"
        )


def check_shares(shares: Tensor | None, page_table: Tensor) -> None:
    """Raise ValueError where shares are not what `decode_attention` adds to."""
    if shares is None:
        return
    fits = shares.shape == page_table.shape and shares.dtype == torch.float32
    if not fits or not shares.is_contiguous() or shares.device != page_table.device:
        raise ValueError(
            f"shares is {tuple(shares.shape)} {shares.dtype} on {shares.device}, not contiguous "
            f"float32 of {tuple(page_table.shape)} on {page_table.device}"
        )


def _weights(
    sink_q: Tensor, q: Tensor, keys: Tensor, sink_slots: int, mask: Tensor, scale: float
) -> Tensor:
    """Weights [..., queries, slots] of attention whose first `sink_slots` keys meet `sink_q` and
    the others `q`, in float32 or wider.

    Shapes:
        sink_q, q: [..., queries, head_dim]; keys: [..., slots, head_dim].
        mask: broadcasts to [..., queries, slots], added to scores.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = keys.to(wide).transpose(-1, -2)
    scores = torch.cat(
        (sink_q.to(wide) @ keys[..., :sink_slots], q.to(wide) @ keys[..., sink_slots:]), -1
    )
    return scores.mul_(scale).add_(mask).softmax(-1)


def _gather(
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    part: GatherPart,
    scratch: Tensor,
    packed: PackedPages | None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of a part, each [R, num_kv_heads, tokens, head_dim], valid until the next."""
    table = page_table[part.table_rows, part.columns]
    gathered = _copy_pages(kv, layer, table, scratch, packed)
    gathered = gathered.view(2, kv.shape[4], -1, kv.shape[6]).index_fill_(2, part.outside, 0)
    keys, values = gathered.view(2, kv.shape[4], len(part.mask), -1, kv.shape[6]).transpose(1, 2)
    return keys, values


def _copy_pages(
    kv: Tensor, layer: int, table: Tensor, scratch: Tensor, packed: PackedPages | None
) -> Tensor:
    """Copy pages of a table, of either format, into a scratch; packed ones are unpacked.

    Returns:
        [2, num_kv_heads, len(table), page_tokens, head_dim], in the scratch.

    Raises:
        ValueError: the table names a page that is not there.
    """
    where = None
    if packed is not None:
        table, where, ids = find_packed(table, packed, kv)
    pages = layer_pages(kv, layer).permute(1, 2, 0, 3, 4)  # [2, heads, rows, tokens, dim]
    _, heads, _, page_tokens, dim = pages.shape
    gathered = scratch[: 2 * heads * len(table) * page_tokens * dim]
    gathered = gathered.view(2, heads, len(table), page_tokens, dim)
    try:
        torch.index_select(pages, 2, page_rows(kv, table), out=gathered)
    except IndexError as error:  # of the CPU; a GPU does not say
        raise ValueError(
            f"page_table names a page that kv does not have: pages {int(table.min())} to "
            f"{int(table.max())} of {kv.shape[0] * kv.shape[1]}"
        ) from error
    if packed is not None and where is not None and len(where):
        for side, read in zip(gathered, read_packed(packed, layer, ids), strict=True):
            side.index_copy_(1, where, read.to(gathered.dtype))
    return gathered


class _PageReader:
    """Gathers the keys and values of a run of tokens, and of sinks, out of their pages."""

    def __init__(
        self,
        kv: Tensor,
        layer: int,
        page_table: Tensor,
        lengths: list[int],
        packed: PackedPages | None,
    ) -> None:
        self._kv, self._layer, self._page_table, self._packed = kv, layer, page_table, packed
        most_pages = -(-max(lengths, default=0) // kv.shape[5]) + 1
        self._scratch = kv.new_empty(most_pages * 2 * kv.shape[4:].numel())

    def read(self, row: int, leading: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `leading` tokens of a sequence, and of tokens [start, stop).

        Slots before and after them, which may hold anything, NaN too, are left out.

        Returns:
            Each [1, num_kv_heads, leading + stop - start, head_dim], valid until the next read.
        """
        page_tokens, table = self._kv.shape[5], self._page_table[row]
        first, last = start // page_tokens, -(-stop // page_tokens)
        sink_pages = -(-leading // page_tokens)
        table = torch.cat((table[:sink_pages], table[first:last]))
        gathered = _copy_pages(self._kv, self._layer, table, self._scratch, self._packed)
        slots = gathered.view(2, 1, self._kv.shape[4], -1, self._kv.shape[6])
        offset = (first - sink_pages) * page_tokens
        shown = slots[:, :, :, start - offset : stop - offset]
        if leading:
            shown = torch.cat((slots[:, :, :, :leading], shown), 3)
        keys, values = shown
        return keys, values


def _check_table(page_table: Tensor, kv_lens: Tensor, max_pages: int) -> None:
    if page_table.ndim != 2 or page_table.dtype != torch.int32 or len(page_table) != len(kv_lens):
        raise ValueError(
            f"page_table is {tuple(page_table.shape)} {page_table.dtype}, not int32 of "
            f"[{len(kv_lens)}, max_pages]"
        )
    if max_pages > page_table.shape[1]:
        raise ValueError(
            f"kv_lens go up to {max_pages} pages; page_table holds {page_table.shape[1]}"
        )


def _check_starts(rows: int, query_starts: Tensor, lengths: list[int]) -> list[int]:
    """The starts as numbers, once they divide the rows among the sequences."""
    if query_starts.ndim != 1 or query_starts.dtype != torch.int32:
        raise ValueError(
            f"query_starts is {tuple(query_starts.shape)} {query_starts.dtype}, not int32 of "
            f"[{len(lengths) + 1}]"
        )
    starts: list[int] = query_starts.tolist()
    if len(starts) != len(lengths) + 1 or starts[0] < 0 or starts[-1] > rows:
        raise ValueError(
            f"query_starts {starts} do not divide {rows} rows of q into {len(lengths)} sequences"
        )
    for start, stop, length in zip(starts, starts[1:], lengths, strict=False):
        if stop < start or stop - start > length > 0:
            raise ValueError(
                f"query_starts gives {stop - start} rows to a sequence of {length} tokens"
            )
    return starts
