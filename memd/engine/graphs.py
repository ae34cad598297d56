"""Captured steps: everything from the slots to the next tokens as one launch.

Engine thread only, and one stream: a replay reads the inputs that were sent just before it, and its
results are overwritten by the next one.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import numpy as np
import torch

from memd.engine.plan import Chunk
from memd.engine.prefix_groups import MAX_GROUPS, PrefixGroup
from memd.engine.slots import slot_of

# What one plan of the decode kernel divides.
MAX_ROWS = 1024

# Larger steps are bound by the device, not by launches.
MAX_PREFILL_TOKENS = 8192

# Smaller batches read so little twice that a graph of their own is not worth its memory.
LEAST_GROUPED_ROWS = 8

# A chunk that leaves more of its graph unused than this part of itself runs as an eager pass, but
# not where a pass is bound by its launches anyway.
MOST_UNUSED = 1 / 8
LAUNCH_BOUND_TOKENS = 512

P = ParamSpec("P")
DecodeStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class PrefillInputs:
    """Prefill chunks of S sequences and T tokens in all, on the device, all int32.

    Behind the last token and the last sequence is padding.
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    sequence_of: torch.Tensor  # [T], 0 to S
    slots: torch.Tensor  # [S]; padding: that of padding
    lens: torch.Tensor  # [S], tokens with these; padding: 0
    starts: torch.Tensor  # [S + 1], first row of each sequence; padding: the end of the last
    sampled_slots: torch.Tensor  # [S], where the next token goes; if there is none: to padding


PrefillStep = Callable[[PrefillInputs], torch.Tensor]
Graph = tuple[torch.cuda.CUDAGraph, torch.Tensor]


def batch_sizes(largest: int) -> list[int]:
    """Sizes of batches that are captured: every batch fits one with little padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_ROWS + 1, 64)]
    return [size for size in sizes if size < largest] + [min(largest, MAX_ROWS)]


class DecodeGraphs:
    """One or two CUDA graphs for each batch size, over one set of inputs.

    The second is for batches in which sequences share a prefix.

    Args:
        step: `(slots [B] int32, kv_lens [B] int32, groups | None) -> [2, B]` int64, tokens and
            whether they failed; computes a step of B rows, of which those of length 0 are padding.
            `groups` as for `shared_prefix_attention`.
        padding: The slot of padding rows.
        max_batch: Most rows of a batch.
        grouped: Whether to have graphs for shared prefixes too.
        device: A CUDA device.
    """

    def __init__(
        self, step: DecodeStep, padding: int, max_batch: int, grouped: bool, device: torch.device
    ) -> None:
        self._step = step
        self._padding = padding
        self._sizes = batch_sizes(max_batch)
        self._grouped = grouped
        # Slots, lengths, groups: one piece of memory, sent in one copy.
        width = self._sizes[-1]
        self._inputs = torch.empty(2 * width + 3 * MAX_GROUPS, dtype=torch.int32, device=device)
        self._slots, self._lens, groups = self._inputs.split((width, width, 3 * MAX_GROUPS))
        self._groups = groups.view(MAX_GROUPS, 3)
        self._graphs: dict[tuple[int, bool], Graph] = {}

    @property
    def max_batch(self) -> int:
        return self._sizes[-1]

    def capture(self, memory: Any, on_progress: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the others find room in its memory."""
        self._send([], [], [])
        keys = [(size, False) for size in self._sizes]
        if self._grouped:
            keys += [(size, True) for size in self._sizes if size >= LEAST_GROUPED_ROWS]
        for done, (size, grouped) in enumerate(sorted(keys, reverse=True)):
            on_progress(done / len(keys))
            groups = self._groups if grouped else None
            self._graphs[size, grouped] = _captured(
                memory, self._step, self._slots[:size], self._lens[:size], groups
            )

    def takes_groups(self, count: int) -> bool:
        """Whether a batch of so many rows is computed by its groups."""
        return self._grouped and self._size(count) >= LEAST_GROUPED_ROWS

    def run(
        self, slots: Sequence[int], kv_lens: Sequence[int], groups: Sequence[PrefixGroup]
    ) -> torch.Tensor:
        """Compute a batch; its results, `[2, len(slots)]`, are overwritten by the next one.

        Groups only where `takes_groups`.
        """
        self._send(slots, kv_lens, groups)
        graph, results = self._graphs[self._size(len(slots)), bool(groups)]
        graph.replay()
        return results[:, : len(slots)]

    def _size(self, count: int) -> int:
        """Rows of the smallest graph for so many."""
        return self._sizes[bisect_left(self._sizes, count)]

    def _send(
        self, slots: Sequence[int], kv_lens: Sequence[int], groups: Sequence[PrefixGroup]
    ) -> None:
        width = len(self._slots)
        layout = decode_layout(slots, kv_lens, groups, width, self._padding)
        self._inputs.copy_(_pinned(layout), non_blocking=True)


class PrefillGraphs:
    """One CUDA graph for each of some numbers of tokens.

    Args:
        step: `inputs -> [2, S]` int64, tokens and whether they failed.
        padding: The slot of padding.
        max_tokens: Most tokens of a step.
        max_sequences: Most sequences of a step.
        device: A CUDA device.
    """

    def __init__(
        self,
        step: PrefillStep,
        padding: int,
        max_tokens: int,
        max_sequences: int,
        device: torch.device,
    ) -> None:
        self._step = step
        self._padding = padding
        self._max_sequences = max_sequences
        self._sizes = prefill_sizes(max_tokens)
        largest = self._sizes[-1]
        self._memory = torch.empty(
            3 * largest + 4 * self._sequences(largest) + 1, dtype=torch.int32, device=device
        )
        self._graphs: dict[int, Graph] = {}

    def capture(self, memory: Any, on_progress: Callable[[float], None]) -> None:
        """Capture all sizes, the largest first, so that the others find room in its memory."""
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done / len(self._sizes))
            self._send(size, [])
            self._graphs[size] = _captured(memory, self._step, self._inputs(size))

    def fitting(self, chunks: Sequence[Chunk]) -> int | None:
        """The size of the graph that suits the chunks, if one does."""
        tokens = sum(chunk.count for chunk in chunks)
        if tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, tokens)]
        unused = size - tokens
        suits = size <= LAUNCH_BOUND_TOKENS or unused <= MOST_UNUSED * tokens
        return size if suits and len(chunks) <= self._sequences(size) else None

    def run(self, size: int, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute chunks; the results, `[2, len(chunks)]`, mean nothing where none is sampled."""
        self._send(size, chunks)
        graph, results = self._graphs[size]
        graph.replay()
        return results[:, : len(chunks)]

    def _sequences(self, size: int) -> int:
        """Most sequences in the graph of a size: each costs idle programs and a row of logits."""
        return min(self._max_sequences, max(size // 16, 1))

    def _inputs(self, size: int) -> PrefillInputs:
        return prefill_inputs(self._memory, size, self._sequences(size))

    def _send(self, size: int, chunks: Sequence[Chunk]) -> None:
        layout = prefill_layout(chunks, size, self._sequences(size), self._padding)
        self._memory[: len(layout)].copy_(_pinned(layout), non_blocking=True)


def decode_layout(
    slots: Sequence[int],
    kv_lens: Sequence[int],
    groups: Sequence[PrefixGroup],
    width: int,
    padding: int,
) -> np.ndarray:
    """Slots [width], lengths [width] and groups [MAX_GROUPS, 3] one after the other, int32."""
    layout = np.zeros(2 * width + 3 * MAX_GROUPS, np.int32)
    layout[:width] = padding
    layout[: len(slots)] = slots
    layout[width : width + len(kv_lens)] = kv_lens
    for index, group in enumerate(groups):
        place = 2 * width + 3 * index
        layout[place : place + 3] = group.first_row, group.num_rows, group.num_pages
    return layout


def prefill_layout(chunks: Sequence[Chunk], size: int, sequences: int, padding: int) -> np.ndarray:
    """The parts of `PrefillInputs` for T = size and S = sequences one after the other, int32."""
    counts = [chunk.count for chunk in chunks]
    ends = np.cumsum([0, *counts])
    layout = np.zeros(3 * size + 4 * sequences + 1, np.int32)
    per_token, per_sequence = layout[: 3 * size].reshape(3, size), layout[3 * size :]
    for chunk, start, end in zip(chunks, ends, ends[1:], strict=False):
        per_token[0, start:end] = chunk.request.tokens[chunk.start : chunk.stop]
        per_token[1, start:end] = np.arange(chunk.start, chunk.stop)
    per_token[2, : ends[-1]] = np.repeat(np.arange(len(chunks)), counts)
    slots, lens, starts, sampled = np.split(
        per_sequence, [sequences, 2 * sequences, 3 * sequences + 1]
    )
    slots[:] = sampled[:] = padding
    starts[:] = ends[-1]
    count = len(chunks)
    slots[:count] = [slot_of(chunk.request) for chunk in chunks]
    lens[:count] = [chunk.stop for chunk in chunks]
    starts[: count + 1] = ends
    sampled[:count] = [slot_of(chunk.request) if chunk.samples else padding for chunk in chunks]
    return layout


def prefill_inputs(memory: torch.Tensor, size: int, sequences: int) -> PrefillInputs:
    """What `prefill_layout` has laid out, as views of the memory that it was copied to."""
    parts = (size, size, size, sequences, sequences, sequences + 1, sequences)
    return PrefillInputs(*memory[: sum(parts)].split(parts))


def prefill_sizes(largest: int) -> list[int]:
    """Numbers of tokens that are captured."""
    sizes = [16, 32, 64, 128, 256, 512, 768, *range(1024, MAX_PREFILL_TOKENS + 1, 1024)]
    return [size for size in sizes if size < largest] + [min(largest, MAX_PREFILL_TOKENS)]


def _captured(
    memory: Any, step: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs
) -> Graph:
    """A step as a graph, after it has run once and compiled what it needs."""
    step(*args, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        results = step(*args, **kwargs)
    return graph, results


def _pinned(layout: np.ndarray) -> torch.Tensor:
    staging = torch.empty(layout.shape, dtype=torch.int32, pin_memory=True)
    staging.numpy()[:] = layout
    return staging
