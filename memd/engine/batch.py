"""Turns a step plan into tensors. Host bookkeeping, and the gathering of what slots hold."""

from dataclasses import dataclass

import numpy as np
import torch

from memd.engine.graphs import PrefillInputs
from memd.engine.plan import Chunk, StepPlan
from memd.engine.request import Request
from memd.engine.slots import Slots, slot_of, upload
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout


@dataclass(frozen=True)
class PromptRows:
    """Logits rows `[row, row + count)` belong to prompt positions from `position` on."""

    request: Request
    position: int
    row: int
    count: int


@dataclass(frozen=True)
class StepBatch:
    """One forward pass as the device sees it, and what its logits rows are for."""

    forward: ForwardBatch
    slots: torch.Tensor  # [S] int64, of the sequences
    sampled: list[Request]
    sampled_rows: torch.Tensor  # [len(sampled)] int64, rows of the logits
    sampled_slots: torch.Tensor  # [len(sampled)] int64
    sampled_lens: torch.Tensor  # [len(sampled)] int64, tokens before the one sampled
    prompts: list[PromptRows]


def build_batch(plan: StepPlan, slots: Slots, layout: KVLayout, device: torch.device) -> StepBatch:
    """Lay a plan out: decode rows first, then the prefill chunks, one row a token.

    Decoding sequences find their token in their slots, where the step before has put it.
    """
    chunks, num_decodes = plan.chunks, len(plan.decodes)
    counts = [chunk.count for chunk in plan.prefills]
    rows, prompts, sampling = _logits_rows(chunks)
    sequences, lens, starts, tokens, positions, sequence_of, picked, places = upload(
        device,
        np.array([slot_of(chunk.request) for chunk in chunks], np.int64),
        np.array([chunk.stop for chunk in chunks], np.int32),
        np.cumsum([num_decodes, *counts]).astype(np.int32),
        _concatenated([_token_ids(chunk) for chunk in plan.prefills]),
        _concatenated([_positions(chunk) for chunk in plan.prefills]),
        np.repeat(np.arange(num_decodes, len(chunks)), counts),
        np.array(rows, np.int64),
        np.array(
            [
                [row for row, _ in sampling],
                [slot_of(chunk.request) for _, chunk in sampling],
                [chunk.stop for _, chunk in sampling],
            ],
            np.int64,
        ),
    )
    width = max(_pages_read(chunk, layout) for chunk in chunks)
    page_table = slots.page_table[:, :width].index_select(0, sequences)
    dropped = slots.dropped_tokens.index_select(0, sequences)
    if num_decodes:
        decoding = sequences[:num_decodes]
        tokens = torch.cat((slots.last_token.index_select(0, decoding), tokens))
        positions = torch.cat((lens[:num_decodes].long() - 1, positions))
        first_rows = torch.arange(num_decodes, device=device)
        sequence_of = torch.cat((first_rows, sequence_of))
    stored = positions - dropped[sequence_of]
    forward = ForwardBatch(
        token_ids=tokens,
        positions=positions,
        write_pages=page_table[sequence_of, stored // layout.page_tokens],
        write_offsets=stored % layout.page_tokens,
        page_table=page_table,
        num_decodes=num_decodes,
        query_starts=starts,
        kv_lens=lens - dropped,
        logits_rows=picked,
    )
    sampled_rows, sampled_slots, sampled_lens = places.unbind()
    sampled = [chunk.request for _, chunk in sampling]
    return StepBatch(
        forward, sequences, sampled, sampled_rows, sampled_slots, sampled_lens, prompts
    )


def decode_batch(
    sequences: torch.Tensor,
    lens: torch.Tensor,
    groups: torch.Tensor | None,
    slots: Slots,
    layout: KVLayout,
) -> ForwardBatch:
    """A batch of decoding sequences and padding, of what is on the device alone.

    Shapes:
        sequences: [B], int64, slots; padding: `slots.padding`.
        lens: [B], int32, tokens with the one to compute; 0: padding.
        groups: as for `shared_prefix_attention`; None: no rows share pages.
    """
    kv_lens = (lens - slots.dropped_tokens.index_select(0, sequences)).clamp_min(0)
    stored = (kv_lens - 1).clamp_min(0).long()
    page_table = slots.page_table.index_select(0, sequences)
    pages = page_table.gather(1, (stored // layout.page_tokens)[:, None]).squeeze(1)
    return ForwardBatch(
        token_ids=slots.last_token.index_select(0, sequences),
        positions=(lens - 1).clamp_min(0).long(),
        write_pages=pages.masked_fill(lens == 0, -1),
        write_offsets=stored % layout.page_tokens,
        page_table=page_table,
        num_decodes=len(lens),
        query_starts=lens[:0],
        kv_lens=kv_lens,
        logits_rows=None,
        groups=groups,
    )


def prefill_batch(
    inputs: PrefillInputs, packed_chunks: bool, slots: Slots, layout: KVLayout
) -> ForwardBatch:
    """A batch of decoding sequences, prefill chunks and padding, of what is on the device alone.

    Logits are of the rows after which a token is sampled.
    """
    token_ids, positions = inputs.token_ids.long(), inputs.positions.long()
    sequence_of, sequences = inputs.sequence_of.long(), inputs.slots.long()
    row = torch.arange(len(positions), device=positions.device)
    decodes = inputs.num_decodes
    if decodes:
        last = slots.last_token.index_select(0, sequences[:decodes])
        decoding = row[:decodes] < inputs.starts[0]
        token_ids[:decodes] = torch.where(decoding, last, token_ids[:decodes])
    page_table = slots.page_table.index_select(0, sequences)
    dropped = slots.dropped_tokens.index_select(0, sequences)
    # Padding goes by the first sequence, at position 0, which may not be in its pages any more.
    stored = (positions - dropped[sequence_of]).clamp_min(0)
    pages = page_table[sequence_of, stored // layout.page_tokens]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        write_pages=pages.masked_fill(row >= inputs.starts[-1], -1),
        write_offsets=stored % layout.page_tokens,
        page_table=page_table,
        num_decodes=decodes,
        query_starts=inputs.starts,
        kv_lens=(inputs.lens - dropped).clamp_min(0),
        logits_rows=inputs.logits_rows.long(),
        packed_chunks=packed_chunks,
    )


def _pages_read(chunk: Chunk, layout: KVLayout) -> int:
    assert chunk.request.sequence is not None
    return layout.pages_for(chunk.stop) - chunk.request.sequence.dropped_pages


def _positions(chunk: Chunk) -> np.ndarray:
    return np.arange(chunk.start, chunk.stop)


def _token_ids(chunk: Chunk) -> np.ndarray:
    return np.array(chunk.request.tokens[chunk.start : chunk.stop], np.int64)


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _logits_rows(
    chunks: list[Chunk],
) -> tuple[list[int], list[PromptRows], list[tuple[int, Chunk]]]:
    """Which token rows need logits: the last of a chunk that samples, or all if asked for.

    Returns:
        The token rows; what rows of their logits are for prompts; the row of the logits of each
        chunk after which a token is sampled.
    """
    rows: list[int] = []
    prompts: list[PromptRows] = []
    sampling: list[tuple[int, Chunk]] = []
    first = 0
    for chunk in chunks:
        request = chunk.request
        last = first + chunk.count - 1
        asked = request.sampling.prompt_logprobs is not None
        if asked and chunk.start < request.prompt_length:
            prompts.append(PromptRows(request, chunk.start, len(rows), chunk.count))
            rows += range(first, last + 1)
        elif chunk.samples:
            rows.append(last)
        if chunk.draws:
            sampling.append((len(rows) - 1, chunk))
        first = last + 1
    return rows, prompts, sampling
