"""Causal attention of new tokens over the pages of their sequences.

Both functions go through the sequences one at a time. Lengths differ widely, so a padded batch
would read and compute mostly padding; and this way no result depends on what else is in the batch.
One scratch holds the keys and values of each sequence in turn, and stays in the processor's cache.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memd_kernels.reference.pages import check_kv, layer_pages, page_rows

QUERY_TILE = (
    256  # rows that share one mask: bounds its size, and skips most of the keys after a row
)


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend with the last token of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [B, num_heads, head_dim], rotated, the dtype of `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        page_table: [B, max_pages], int64; entries past a sequence's pages are not read.
        kv_lens: B lengths in tokens, each at least 1, with the new token.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all.

    Returns:
        [B, num_heads, head_dim], the dtype of `q`. Softmax and sums are in float32.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above.
    """
    check_kv(kv, layer, q)
    if len(kv_lens) != q.shape[0]:
        raise ValueError(f"kv_lens has {len(kv_lens)} lengths for {q.shape[0]} rows of q")
    _check_lengths(kv, page_table, kv_lens, window)
    reader = _PageReader(kv, layer, page_table, kv_lens)
    # The query heads of one KV head become rows of one matrix: its keys are read once for them all.
    grouped = q.unflatten(1, (1, kv.shape[4], -1))
    outputs = []
    for row, length in enumerate(kv_lens):
        keys, values = reader.read(row, _first_seen(length - 1, window), length)
        outputs.append(F.scaled_dot_product_attention(grouped[row], keys, values, scale=scale))
    return torch.cat(outputs).view(q.shape) if outputs else torch.empty_like(q)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    query_starts: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend with the last tokens of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [T, num_heads, head_dim], rotated, the dtype of `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        page_table: [S, max_pages], int64; entries past a sequence's pages are not read.
        query_starts: S + 1 ascending row numbers from 0 to T; sequence i owns rows
            `query_starts[i]:query_starts[i + 1]`, its last tokens.
        kv_lens: S lengths in tokens, with the new tokens.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all.

    Returns:
        [T, num_heads, head_dim], the dtype of `q`. Softmax and sums are in float32.

    Raises:
        ValueError: a shape, dtype, device or length does not match the above.
    """
    check_kv(kv, layer, q)
    _check_lengths(kv, page_table, kv_lens, window)
    _check_starts(q.shape[0], query_starts, kv_lens)
    reader = _PageReader(kv, layer, page_table, kv_lens)
    group = q.shape[1] // kv.shape[4]
    grouped = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [num_kv_heads, group, T, head_dim]
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grouped_output = output.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    for row, length in enumerate(kv_lens):
        start, stop = query_starts[row], query_starts[row + 1]
        if start == stop:
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


class _PageReader:
    """Gathers the keys and values of a run of tokens out of their pages."""

    def __init__(self, kv: Tensor, layer: int, page_table: Tensor, kv_lens: Sequence[int]) -> None:
        self._page_tokens = kv.shape[5]
        self._pages = layer_pages(kv, layer).permute(1, 2, 0, 3, 4)  # [2, heads, rows, tokens, dim]
        self._rows = page_rows(kv, page_table)
        self._page_numel = 2 * kv.shape[4] * self._page_tokens * kv.shape[6]
        most_pages = -(-max(kv_lens, default=0) // self._page_tokens)
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
    kv: Tensor, page_table: Tensor, kv_lens: Sequence[int], window: int | None
) -> None:
    if page_table.ndim != 2 or page_table.dtype != torch.int64 or len(page_table) != len(kv_lens):
        raise ValueError(
            f"page_table is {tuple(page_table.shape)} {page_table.dtype}, not int64 of "
            f"[{len(kv_lens)}, max_pages]"
        )
    room = page_table.shape[1] * kv.shape[5]
    if kv_lens and not 1 <= min(kv_lens) <= max(kv_lens) <= room:
        raise ValueError(
            f"kv_lens from {min(kv_lens)} to {max(kv_lens)}; page_table holds 1 to {room}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself, so at least 1")


def _check_starts(rows: int, query_starts: Sequence[int], kv_lens: Sequence[int]) -> None:
    if len(query_starts) != len(kv_lens) + 1 or query_starts[0] != 0 or query_starts[-1] != rows:
        raise ValueError(
            f"query_starts {list(query_starts)} do not divide {rows} rows of q "
            f"into {len(kv_lens)} sequences"
        )
    for start, stop, length in zip(query_starts, query_starts[1:], kv_lens, strict=False):
        if not 0 <= stop - start <= length:
            raise ValueError(
                f"query_starts gives {stop - start} rows to a sequence of {length} tokens"
            )
