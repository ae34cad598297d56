"""Turns a step plan into tensors. Host bookkeeping only; nothing is computed here."""

from dataclasses import dataclass

import numpy as np
import torch

from memd.engine.request import Request
from memd.engine.scheduler import Chunk, StepPlan
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout
from memd.pool.sequence import PageCopy


@dataclass(frozen=True)
class PromptRows:
    """Logits rows `[row, row + count)` belong to prompt positions from `position` on."""

    request: Request
    position: int
    row: int
    count: int


@dataclass(frozen=True)
class StepBatch:
    """One step as the device sees it, and what its logits rows are for."""

    forward: ForwardBatch
    copies: list[PageCopy]
    sampled: list[Request]
    sampled_rows: list[int]  # row of the logits for each sampled request
    prompts: list[PromptRows]


def build_batch(plan: StepPlan, layout: KVLayout, device: torch.device) -> StepBatch:
    """Lay a plan out: decode rows first, then the prefill chunks, one row a token."""
    chunks = plan.chunks
    positions = np.concatenate([_positions(chunk) for chunk in chunks])
    page_table = _page_table(chunks, layout)
    sequence_of_row = np.repeat(np.arange(len(chunks)), [chunk.count for chunk in chunks])
    pages, offsets = positions // layout.page_tokens, positions % layout.page_tokens
    rows, sampled, sampled_rows, prompts = _logits_rows(chunks)
    starts = np.cumsum([0] + [chunk.count for chunk in plan.prefills])

    def upload(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

    forward = ForwardBatch(
        token_ids=upload(np.concatenate([_token_ids(chunk) for chunk in chunks])),
        positions=upload(positions),
        write_pages=upload(page_table[sequence_of_row, pages]),
        write_offsets=upload(offsets),
        page_table=upload(page_table),
        num_decodes=len(plan.decodes),
        query_starts=starts.tolist(),
        kv_lens=[chunk.request.num_computed + chunk.count for chunk in chunks],
        logits_rows=upload(np.array(rows)),
    )
    copies = [
        chunk.request.sequence.copy
        for chunk in chunks
        if chunk.request.sequence is not None and chunk.request.sequence.copy is not None
    ]
    return StepBatch(forward, copies, sampled, sampled_rows, prompts)


def _positions(chunk: Chunk) -> np.ndarray:
    start = chunk.request.num_computed
    return np.arange(start, start + chunk.count)


def _token_ids(chunk: Chunk) -> np.ndarray:
    start = chunk.request.num_computed
    return np.array(chunk.request.tokens[start : start + chunk.count])


def _page_table(chunks: list[Chunk], layout: KVLayout) -> np.ndarray:
    """`[sequences, pages]`: the pages that each sequence uses in this step; 0 past its end."""
    needed = [layout.pages_for(chunk.request.num_computed + chunk.count) for chunk in chunks]
    table = np.zeros((len(chunks), max(needed)), dtype=np.int64)
    for row, (chunk, count) in enumerate(zip(chunks, needed, strict=True)):
        assert chunk.request.sequence is not None
        table[row, :count] = chunk.request.sequence.pages[:count]
    return table


def _logits_rows(
    chunks: list[Chunk],
) -> tuple[list[int], list[Request], list[int], list[PromptRows]]:
    """Which token rows need logits: the last of a chunk that samples, or all if asked for."""
    rows: list[int] = []
    sampled: list[Request] = []
    sampled_rows: list[int] = []
    prompts: list[PromptRows] = []
    first = 0
    for chunk in chunks:
        request = chunk.request
        last = first + chunk.count - 1
        asked = request.sampling.prompt_logprobs is not None
        if asked and request.num_computed < request.prompt_length:
            prompts.append(PromptRows(request, request.num_computed, len(rows), chunk.count))
            rows += range(first, last + 1)
        elif chunk.samples:
            rows.append(last)
        if chunk.samples:
            sampled.append(request)
            sampled_rows.append(len(rows) - 1)
        first = last + 1
    return rows, sampled, sampled_rows, prompts
