"""Batch state on the device: a row for each running sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memd.engine.plan import Chunk
from memd.engine.request import Request
from memd.pool.sequence import PoolSequence
from memd.types import PageId


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of some rows, [R] each, as the `sample` kernel takes them."""

    seeds: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Slots:
    """Last token, page table and sampling parameters of each running sequence.

    They stay on the device from step to step; the host sends what has changed. The row after the
    last slot, `padding`, stands for no sequence.

    Attributes:
        last_token: [num_slots + 1], int64; the token that the next decode step computes.
        page_table: [num_slots + 1, max_pages], int32; entries as `KVLayout.table_entry` has them.
        dropped_tokens: [num_slots + 1], int32; tokens in pages that a window has passed, which are
            not in the table.

    Args:
        num_slots: Most sequences that run at once.
        max_pages: Most that a sequence holds at once.
        page_tokens: Tokens in a page.
        device: Where the state is.
        entries: Entries of the page table for pages; None: the pages' ids are their entries.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        page_tokens: int,
        device: torch.device,
        entries: Callable[[Sequence[PageId]], list[int]] | None = None,
    ) -> None:
        rows = num_slots + 1
        self.padding = num_slots
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.dropped_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._whole = torch.zeros(2, rows, dtype=torch.int64, device=device)  # seed, top_k
        self._real = torch.zeros(3, rows, dtype=torch.float32, device=device)  # see `sampling`
        self._device = device
        self._sequences: list[PoolSequence | None] = [None] * num_slots
        self._pages_sent = [0] * num_slots
        self._dropped_sent = [0] * num_slots
        self._page_tokens = page_tokens
        self._entries = entries

    def update(self, chunks: Sequence[Chunk]) -> None:
        """Send what has changed about the sequences of a plan since they were last sent."""
        new: list[Chunk] = []
        told: list[Chunk] = []  # sequences whose next token the host knows and the device does not
        where: list[int] = []
        pages: list[PageId] = []
        dropped: list[tuple[int, int]] = []
        width = self.page_table.shape[1]
        for chunk in chunks:
            slot, sequence = slot_of(chunk.request), chunk.request.sequence
            assert sequence is not None
            # A prompt's last token is computed like a decoding one if a chunk leaves just it.
            leaves_one = not chunk.samples and chunk.request.length - chunk.stop == 1
            if self._sequences[slot] is not sequence:
                self._sequences[slot] = sequence
                self._pages_sent[slot] = 0
                new.append(chunk)
            elif leaves_one:
                told.append(chunk)
            if sequence.rewritten:
                rewritten = [index for index in sequence.rewritten if index < len(sequence.pages)]
                where += [slot * width + index for index in rewritten]
                pages += [sequence.pages[index] for index in rewritten]
                sequence.rewritten.clear()
            if self._dropped_sent[slot] != sequence.dropped_pages:
                self._dropped_sent[slot] = sequence.dropped_pages
                dropped.append((slot, sequence.dropped_pages * self._page_tokens))
            sent, count = self._pages_sent[slot], len(sequence.pages)
            if sent < count:
                where += range(slot * width + sent, slot * width + count)
                pages += sequence.pages[sent:]
            self._pages_sent[slot] = count
        if new:
            self._send_sampling(new)
        if new or told:
            self._send_tokens(new + told)
        if where:
            entries = pages if self._entries is None else self._entries(pages)
            places, values = upload(
                self._device, np.array(where, np.int64), np.array(entries, np.int32)
            )
            self.page_table.view(-1).index_copy_(0, places, values)
        if dropped:
            slots, tokens = upload(self._device, *np.array(dropped, np.int64).T)
            self.dropped_tokens.index_copy_(0, slots, tokens.int())

    def sampling(self, slots: torch.Tensor) -> SamplingState:
        """Sampling parameters of some rows; `slots` [R], int64."""
        seeds, top_k = self._whole.index_select(1, slots)
        temperature, top_p, min_p = self._real.index_select(1, slots)
        return SamplingState(seeds, top_k, temperature, top_p, min_p)

    def _send_tokens(self, chunks: list[Chunk]) -> None:
        """The token that each sequence computes next; what a chunk samples overwrites it."""
        slots, tokens = upload(
            self._device,
            np.array([slot_of(chunk.request) for chunk in chunks], np.int64),
            np.array(
                [
                    chunk.request.tokens[chunk.start if chunk.samples else chunk.stop]
                    for chunk in chunks
                ],
                np.int64,
            ),
        )
        self.last_token.index_copy_(0, slots, tokens)

    def _send_sampling(self, chunks: list[Chunk]) -> None:
        params = [chunk.request.sampling for chunk in chunks]
        slots, whole, real = upload(
            self._device,
            np.array([slot_of(chunk.request) for chunk in chunks], np.int64),
            np.array([[p.seed for p in params], [p.top_k for p in params]], np.int64),
            np.array(
                [
                    [p.temperature for p in params],
                    [p.top_p for p in params],
                    [p.min_p for p in params],
                ],
                np.float32,
            ),
        )
        self._whole.index_copy_(1, slots, whole)
        self._real.index_copy_(1, slots, real)


def slot_of(request: Request) -> int:
    """The slot of a running request."""
    assert request.slot is not None
    return request.slot


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays on the device, in one copy from pinned memory that the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0] + [-(-array.nbytes // 16) * 16 for array in arrays]).tolist()
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    room = staging.numpy()
    for start, array in zip(starts, arrays, strict=False):
        room[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    sent = staging.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0].reshape(-1)).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
