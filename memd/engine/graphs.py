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

from memd.engine.plan import StepPlan
from memd.engine.prefix_groups import MAX_GROUPS, PrefixGroup
from memd.engine.slots import slot_of

# What one plan of the decode kernel divides.
MAX_ROWS = 1024

# Larger steps are bound by the device, not by launches.
MAX_PREFILL_TOKENS = 8192

# Rows of passes with decodes. The small ones have room beside chunks that fill a size themselves;
# for the larger ones a few rows more would cost a whole wave of tiles, but for the last two, of 33
# and 66 tiles of 128 rows, which the 132 multiprocessors of an H100 or H200 share evenly.
MIXED_ROWS = (96, 160, 288, 576, 1024, 2048, 4224, 8448)

# A pass of fewer rows takes hardly less time: it reads all weights and launches all kernels.
LEAST_ROWS = 256

# Smaller batches read so little twice that a graph of their own is not worth its memory.
LEAST_GROUPED_ROWS = 8

# A chunk that leaves more of its graph unused than this part of itself runs as an eager pass, but
# not where a pass is bound by its launches anyway.
MOST_UNUSED = 1 / 8
LAUNCH_BOUND_TOKENS = 512

P = ParamSpec("P")
DecodeStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class PrefillShape:
    """How much a pass of prefill chunks, and of decoding sequences beside them, has room for.

    Each place for a sequence costs idle programs, and each to sample a row of logits.
    """

    tokens: int  # T, of all sequences
    decodes: int  # D, sequences that decode
    chunks: int  # C
    sampled: int  # R, sequences after which a token is sampled

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the parts of `PrefillInputs`."""
        rows, sequences = (self.tokens,) * 3, (self.decodes + self.chunks,) * 2
        return self.chunks + 1, *rows, *sequences, *(self.sampled,) * 3

    @staticmethod
    def of(plan: StepPlan) -> "PrefillShape":
        """What a plan takes."""
        tokens = sum(chunk.count for chunk in plan.chunks)
        return PrefillShape(tokens, len(plan.decodes), len(plan.prefills), len(plan.sampled))

    def holds(self, other: "PrefillShape") -> bool:
        """Whether there is room for all of another one."""
        return (
            other.tokens <= self.tokens
            and other.decodes <= self.decodes
            and other.chunks <= self.chunks
            and other.sampled <= self.sampled
        )


@dataclass(frozen=True)
class PrefillInputs:
    """Rows of decoding sequences, then those of prefill chunks; on the device, all int32.

    Sizes as in `PrefillShape`; S = D + C. Behind the last row, and the last sequence of either
    kind, is padding. What kernels read comes first: they are compiled for its alignment.
    """

    starts: torch.Tensor  # [C + 1], first row of each chunk; padding: the end of the last
    token_ids: torch.Tensor  # [T]; of decoding sequences any: their slots have them
    positions: torch.Tensor  # [T]
    sequence_of: torch.Tensor  # [T], 0 to S
    slots: torch.Tensor  # [S], decoding sequences first; padding: that of padding
    lens: torch.Tensor  # [S], tokens with these; padding: 0
    logits_rows: torch.Tensor  # [R], rows after which a token is sampled; padding: 0
    sampled_slots: torch.Tensor  # [R], where it goes
    sampled_lens: torch.Tensor  # [R], tokens before it

    @property
    def num_decodes(self) -> int:
        """D."""
        return len(self.slots) - len(self.starts) + 1


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
    """One CUDA graph for each of some shapes.

    Args:
        step: `inputs -> [2, R]` int64, tokens and whether they failed.
        padding: The slot of padding.
        shapes: In ascending order.
        device: A CUDA device.
    """

    def __init__(
        self, step: PrefillStep, padding: int, shapes: list[PrefillShape], device: torch.device
    ) -> None:
        self._step = step
        self._padding = padding
        self._shapes = shapes
        most = max(sum(shape.parts) for shape in shapes)
        self._memory = torch.empty(most, dtype=torch.int32, device=device)
        self._graphs: dict[PrefillShape, Graph] = {}

    def capture(self, memory: Any, on_progress: Callable[[float], None]) -> None:
        """Capture all shapes, the largest first, so that the others find room in its memory."""
        for done, shape in enumerate(reversed(self._shapes)):
            on_progress(done / len(self._shapes))
            self._send(shape, StepPlan([], []))
            inputs = prefill_inputs(self._memory, shape)
            self._graphs[shape] = _captured(memory, self._step, inputs)

    def fitting(self, taken: PrefillShape) -> PrefillShape | None:
        """The least shape that has room for what a plan takes, if one has."""
        return next((shape for shape in self._shapes if shape.holds(taken)), None)

    def run(self, shape: PrefillShape, plan: StepPlan) -> torch.Tensor:
        """Compute a plan; the results, `[2, len(plan.sampled)]`, are overwritten by the next."""
        self._send(shape, plan)
        graph, results = self._graphs[shape]
        graph.replay()
        return results[:, : len(plan.sampled)]

    def _send(self, shape: PrefillShape, plan: StepPlan) -> None:
        layout = prefill_layout(plan, shape, self._padding)
        self._memory[: len(layout)].copy_(_pinned(layout), non_blocking=True)


def suits(shape: PrefillShape, tokens: int) -> bool:
    """Whether a shape computes so many tokens in less time than an eager pass does."""
    unused = shape.tokens - tokens
    return shape.tokens <= LAUNCH_BOUND_TOKENS or unused <= MOST_UNUSED * tokens


def joins(shape: PrefillShape, prompt_rows: int, decode_rows: int) -> bool:
    """Whether one pass of a shape takes less time than one for prompts and one for decodes."""
    apart = max(prompt_rows, LEAST_ROWS) + max(decode_rows, LEAST_ROWS)
    return max(shape.tokens, LEAST_ROWS) <= apart


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


def prefill_layout(plan: StepPlan, shape: PrefillShape, padding: int) -> np.ndarray:
    """The parts of `PrefillInputs` one after the other, int32."""
    layout = np.zeros(sum(shape.parts), np.int32)
    starts, tokens, positions, sequence_of, slots, lens, rows, sampled_slots, sampled_lens = (
        np.split(layout, np.cumsum(shape.parts[:-1]))
    )
    chunks, decodes = plan.chunks, len(plan.decodes)
    counts = np.array([chunk.count for chunk in chunks], np.int64)
    ends = counts.cumsum()
    begins, used = ends - counts, counts.sum()
    for chunk, begin, end in zip(plan.prefills, begins[decodes:], ends[decodes:], strict=True):
        tokens[begin:end] = chunk.request.tokens[chunk.start : chunk.stop]
        positions[begin:end] = np.arange(chunk.start, chunk.stop)
    positions[:decodes] = [chunk.start for chunk in plan.decodes]
    # Places of sequences: chunks come behind those that decode and their padding.
    places = np.arange(len(chunks))
    places[decodes:] += shape.decodes - decodes
    sequence_of[:used] = np.repeat(places, counts)
    slots[:] = sampled_slots[:] = padding
    slots[places] = [slot_of(chunk.request) for chunk in chunks]
    lens[places] = [chunk.stop for chunk in chunks]
    starts[:] = used
    starts[: len(plan.prefills)] = begins[decodes:]
    drawn = np.array([chunk.draws for chunk in chunks], bool)
    count = drawn.sum()
    rows[:count] = ends[drawn] - 1
    sampled_slots[:count] = slots[places[drawn]]
    sampled_lens[:count] = lens[places[drawn]]
    return layout


def prefill_inputs(memory: torch.Tensor, shape: PrefillShape) -> PrefillInputs:
    """What `prefill_layout` has laid out, as views of the memory that it was copied to."""
    return PrefillInputs(*memory[: sum(shape.parts)].split(shape.parts))


def prefill_shapes(max_tokens: int, max_sequences: int) -> list[PrefillShape]:
    """Shapes of prefill chunks alone that are captured."""
    sizes = [16, 32, 64, 128, 256, 512, 768, *range(1024, MAX_PREFILL_TOKENS + 1, 1024)]
    largest = min(max_tokens, MAX_PREFILL_TOKENS)
    sizes = [size for size in sizes if size < largest] + [largest]
    return [_shape(size, 0, max_sequences) for size in sizes]


def mixed_shapes(max_tokens: int, max_sequences: int) -> list[PrefillShape]:
    """Shapes with decodes that are captured: few, each of them costs time at the start."""
    count = bisect_left(MIXED_ROWS, min(max_tokens, MIXED_ROWS[-1])) + 1
    return [_shape(size, min(size, MAX_ROWS), max_sequences) for size in MIXED_ROWS[:count]]


def _shape(tokens: int, decodes: int, max_sequences: int) -> PrefillShape:
    decodes = min(decodes, max_sequences)
    chunks = min(max(tokens // 16, 1), max(tokens // 64, 128), max_sequences)
    return PrefillShape(tokens, decodes, chunks, min(decodes + chunks, max_sequences, tokens))


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
