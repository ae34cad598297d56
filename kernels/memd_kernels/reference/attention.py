"""Causal attention of new tokens over the pages of their sequences.

Lengths differ widely, so one padded batch would read and compute mostly padding: prefill goes
through the sequences one at a time, decoding takes those together that are about as long. Nothing
that a sequence gets depends on what else is in the batch. A scratch holds keys and values of what
is computed together, and stays in the processor's cache.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from memd_kernels.plan import DecodePlan
from memd_kernels.reference.pages import check_kv, layer_pages, page_rows

QUERY_TILE = (
    256  # rows that share one mask: bounds its size, and skips most of the keys after a row
)
ALIKE_PAGES = 4  # decoding sequences are padded to a multiple of so many pages
SCRATCH_BYTES = 16 * 2**20


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attend with the last token of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [B, num_heads, head_dim], rotated, the dtype of `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        page_table: [B, max_pages], int32; entries past a sequence's pages are not read.
        kv_lens: [B], int32, lengths in tokens with the new token; 0: a row of padding.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all.
        plan: `plan_decode` of the same lengths and window, to divide the work once for all layers.

    Returns:
        [B, num_heads, head_dim], the dtype of `q`; zeros in rows of padding. Softmax and sums are
        in float32.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above.
    """
    check_kv(kv, layer, q)
    if len(kv_lens) != q.shape[0]:
        raise ValueError(f"kv_lens has {len(kv_lens)} lengths for {q.shape[0]} rows of q")
    lengths = _check_lengths(kv, page_table, kv_lens, window)
    # The query heads of one KV head become rows of one matrix: its keys are read once for them all.
    grouped = q.unflatten(1, (kv.shape[4], -1))
    output = torch.zeros(grouped.shape, dtype=q.dtype, device=q.device)
    pages, table = layer_pages(kv, layer).permute(1, 2, 0, 3, 4), page_rows(kv, page_table)
    for rows, spans in _alike(lengths, window, kv):
        keys, values, mask = _gather(pages, table, rows, spans)
        output[rows] = F.scaled_dot_product_attention(
            grouped[rows], keys, values, attn_mask=mask, scale=scale
        )
    return output.view(q.shape)


def shared_prefix_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    groups: Tensor,
    scale: float,
    window: int | None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """`decode_attention` for groups of sequences whose page tables begin with the same pages.

    The result is that of `decode_attention`; where a kernel makes use of the groups, each shared
    page is read once for a group.

    Shapes:
        q, kv, layer, page_table, kv_lens, scale, window: as for `decode_attention`.
        groups: [capacity, 3], int32; first row, number of rows and number of shared pages, full
            ones, of each group. A number of rows or pages of 0: not used. Groups do not overlap,
            and each of their rows is longer than what it shares.
        plan: `plan_decode` of the same lengths, window and groups.

    Returns:
        [B, num_heads, head_dim], the dtype of `q`; zeros in rows of padding.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above.
    """
    if groups.ndim != 2 or groups.shape[1] != 3 or groups.dtype != torch.int32:
        raise ValueError(
            f"groups is {tuple(groups.shape)} {groups.dtype}, not int32 of [capacity, 3]"
        )
    return decode_attention(q, kv, layer, page_table, kv_lens, scale, window, plan)


def plan_decode(
    kv_lens: Tensor, kv: Tensor, num_heads: int, window: int | None, groups: Tensor | None = None
) -> DecodePlan | None:
    """None: here the work is not divided."""
    return None


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend with the last tokens of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [T, num_heads, head_dim], rotated, the dtype of `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        page_table: [S, max_pages], int32; entries past a sequence's pages are not read.
        query_starts: [S + 1], int32, ascending row numbers from 0; sequence i owns rows
            `query_starts[i]:query_starts[i + 1]`, its last tokens. Rows past the last are padding.
        kv_lens: [S], int32, lengths in tokens with the new tokens; 0: its rows are padding.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all.

    Returns:
        [T, num_heads, head_dim], the dtype of `q`; zeros in rows of padding. Softmax and sums are
        in float32.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above.
    """
    check_kv(kv, layer, q)
    lengths = _check_lengths(kv, page_table, kv_lens, window)
    starts = _check_starts(q.shape[0], query_starts, lengths)
    reader = _PageReader(kv, layer, page_table, lengths)
    group = q.shape[1] // kv.shape[4]
    grouped = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [num_kv_heads, group, T, head_dim]
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grouped_output = output.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    output[starts[-1] :] = 0
    for row, length in enumerate(lengths):
        start, stop = starts[row], starts[row + 1]
        if length == 0:
            output[start:stop] = 0
        if start == stop or length == 0:
            continue
        first_position = length - (stop - start)
        seen = _first_seen(first_position, window)
        keys, values = (
            part.transpose(0, 1).expand(-1, group, -1, -1)
            for part in reader.read(row, seen, length)
        )
        for tile in range(start, stop, QUERY_TILE):
            tile_stop = min(tile + QUERY_TILE, stop)
            position = first_position + tile - start
            low, high = _first_seen(position, window), position + tile_stop - tile
            grouped_output[:, :, tile:tile_stop] = F.scaled_dot_product_attention(
                grouped[:, :, tile:tile_stop],
                keys[:, :, low - seen : high - seen],
                values[:, :, low - seen : high - seen],
                attn_mask=_causal_mask(tile_stop - tile, high - low, window, q.device),
                scale=scale,
            )
    return output


def _alike(
    lengths: list[int], window: int | None, kv: Tensor
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Rows that read about as many pages, with the tokens [start, stop) that each sees.

    How far a row is padded depends on the row alone, and so does its result.
    """
    page_tokens = kv.shape[5]
    step = ALIKE_PAGES * page_tokens
    alike: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        if length:
            first = _first_seen(length - 1, window) // page_tokens * page_tokens
            alike.setdefault(-(-(length - first) // step) * step, []).append(row)
    for tokens, rows in alike.items():
        most = max(SCRATCH_BYTES // (2 * kv.shape[4] * tokens * kv.shape[6] * kv.itemsize), 1)
        for index in range(0, len(rows), most):
            part = rows[index : index + most]
            yield part, [(_first_seen(lengths[row] - 1, window), lengths[row]) for row in part]


def _gather(
    pages: Tensor, table: Tensor, rows: list[int], spans: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of rows that are alike, and the mask of the tokens that each row sees.

    Returns:
        Keys and values, each [R, num_kv_heads, tokens, head_dim], 0 where a row does not see,
        and pages may hold anything; the mask, [R, 1, 1, tokens], added to scores.
    """
    _, heads, _, page_tokens, dim = pages.shape
    bounds = [(start // page_tokens, -(-stop // page_tokens)) for start, stop in spans]
    count = max(last - first for first, last in bounds)
    count = -(-count // ALIKE_PAGES) * ALIKE_PAGES
    index = torch.cat(
        [
            part
            for row, (first, last) in zip(rows, bounds, strict=True)
            # Padded with the last page; entries behind it may be anything.
            for part in (
                table[row, first:last],
                table[row, last - 1 : last].expand(count - last + first),
            )
        ]
    )
    gathered = pages.new_empty((2, heads, len(index), page_tokens, dim))
    torch.index_select(pages, 2, index, out=gathered)
    gathered = gathered.view(2, heads, len(rows), count * page_tokens, dim)
    mask = gathered.new_zeros((len(rows), 1, 1, count * page_tokens))
    for place, ((first, _), (start, stop)) in enumerate(zip(bounds, spans, strict=True)):
        for unseen in (
            slice(0, start - first * page_tokens),
            slice(stop - first * page_tokens, None),
        ):
            gathered[:, :, place, unseen] = 0
            mask[place, ..., unseen] = -torch.inf
    keys, values = gathered.transpose(1, 2)
    return keys, values, mask


class _PageReader:
    """Gathers the keys and values of a run of tokens out of their pages."""

    def __init__(self, kv: Tensor, layer: int, page_table: Tensor, lengths: list[int]) -> None:
        self._page_tokens = kv.shape[5]
        self._pages = layer_pages(kv, layer).permute(1, 2, 0, 3, 4)  # [2, heads, rows, tokens, dim]
        self._rows = page_rows(kv, page_table)
        self._page_numel = 2 * kv.shape[4] * self._page_tokens * kv.shape[6]
        most_pages = -(-max(lengths, default=0) // self._page_tokens)
        self._scratch = kv.new_empty(most_pages * self._page_numel)

    def read(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens [start, stop) of a sequence.

        Slots before and after them, which may hold anything, NaN too, are left out.

        Returns:
            Each [1, num_kv_heads, stop - start, head_dim], valid until the next read.
        """
        first, last = start // self._page_tokens, -(-stop // self._page_tokens)
        _, heads, _, tokens, dim = self._pages.shape
        gathered = self._scratch[: (last - first) * self._page_numel]
        gathered = gathered.view(2, heads, last - first, tokens, dim)
        torch.index_select(self._pages, 2, self._rows[row, first:last], out=gathered)
        offset = first * tokens
        keys, values = gathered.view(2, 1, heads, -1, dim)[:, :, :, start - offset : stop - offset]
        return keys, values


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Mask [queries, keys] for queries that are the last of the keys; None where all is seen."""
    if queries == 1:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return mask if window is None else mask.triu_(keys - queries - window + 1)


def _check_lengths(
    kv: Tensor, page_table: Tensor, kv_lens: Tensor, window: int | None
) -> list[int]:
    """The lengths as numbers, once they and the page table are what they have to be."""
    if kv_lens.ndim != 1 or kv_lens.dtype != torch.int32:
        raise ValueError(f"kv_lens is {tuple(kv_lens.shape)} {kv_lens.dtype}, not int32 of [rows]")
    if page_table.ndim != 2 or page_table.dtype != torch.int32 or len(page_table) != len(kv_lens):
        raise ValueError(
            f"page_table is {tuple(page_table.shape)} {page_table.dtype}, not int32 of "
            f"[{len(kv_lens)}, max_pages]"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself, so at least 1")
    lengths: list[int] = kv_lens.tolist()
    room = page_table.shape[1] * kv.shape[5]
    if lengths and not 0 <= min(lengths) <= max(lengths) <= room:
        raise ValueError(
            f"kv_lens from {min(lengths)} to {max(lengths)}; page_table holds 0 to {room}"
        )
    return lengths


def _check_starts(rows: int, query_starts: Tensor, lengths: list[int]) -> list[int]:
    """The starts as numbers, once they divide the rows among the sequences."""
    if query_starts.ndim != 1 or query_starts.dtype != torch.int32:
        raise ValueError(
            f"query_starts is {tuple(query_starts.shape)} {query_starts.dtype}, not int32 of "
            f"[{len(lengths) + 1}]"
        )
    starts: list[int] = query_starts.tolist()
    if len(starts) != len(lengths) + 1 or starts[0] != 0 or starts[-1] > rows:
        raise ValueError(
            f"query_starts {starts} do not divide {rows} rows of q into {len(lengths)} sequences"
        )
    for start, stop, length in zip(starts, starts[1:], lengths, strict=False):
        if stop < start or stop - start > length > 0:
            raise ValueError(
                f"query_starts gives {stop - start} rows to a sequence of {length} tokens"
            )
    return starts
