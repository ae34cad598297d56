"""Runs step plans on the device: copies, forward pass, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import memd_kernels as kernels
import torch
from memd_kernels.formats import PackedPages

from memd.engine.attention_shares import AttentionShares
from memd.engine.batch import PromptRows, build_batch, decode_batch, prefill_batch
from memd.engine.device_mover import DeviceMover
from memd.engine.graphs import (
    DecodeGraphs,
    PrefillGraphs,
    PrefillInputs,
    PrefillShape,
    joins,
    mixed_shapes,
    prefill_shapes,
    suits,
)
from memd.engine.messages import TokenLogprobs
from memd.engine.plan import Chunk, StepPlan
from memd.engine.prefix_groups import PrefixGroup, PrefixGrouper
from memd.engine.results import Collect, StepResult, fetch, joined
from memd.engine.sampling import Vocabulary, sample_tokens, token_logprobs
from memd.engine.slots import Slots, slot_of
from memd.models.decoder import ForwardBatch
from memd.pool.defrag import PageMove
from memd.pool.layout import KVLayout


class Forward(Protocol):
    """A model."""

    def __call__(
        self, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        """Logits `[rows, vocab]`; see `memd.models.decoder.Decoder.forward`."""


class PlanRunner(Protocol):
    """What the engine asks of whoever computes its plans."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids that may be sampled."""

    @property
    def steps_ahead(self) -> int:
        """How many steps may be launched before the first of them is collected; 0: none."""

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copy pages, behind the steps launched so far and before the next."""

    def pack(self, moves: Sequence[PageMove]) -> None:
        """Write full pages as packed ones, in the same order."""

    def launch(self, plan: StepPlan) -> Collect:
        """Start computing a plan; what this returns waits for the results.

        Doing it again gives the same results: it writes the same KV.
        """


class Runner:
    """The only code that touches the device during a step.

    A plan runs as one forward pass; with graphs, its decoding sequences and its prefill chunks run
    from one each where that takes less time. On a CUDA device nothing waits for the device between
    `launch` and the call of what it returns, except where a request needs the host to sample.

    Attributes:
        vocabulary: Ids that may be sampled.
        steps_ahead: See `PlanRunner`.

    Args:
        forward: The model.
        kv: All full pages (see `memd.arena.arena.Arena.kv`).
        packed: All packed ones, in the same memory; None: there are none.
        mover: Of the pages in the same memory.
        layout: Byte arithmetic of `kv`.
        vocabulary: Ids that may be sampled.
        slots: Batch state, on the device of `kv`.
        steps_ahead: See `PlanRunner`.
        grouper: Finds shared prefixes for graphs; None: they are not looked for.
        shares: Measured while sequences decode, without `grouper`; None: not wanted.
    """

    def __init__(
        self,
        forward: Forward,
        kv: torch.Tensor,
        packed: PackedPages | None,
        mover: DeviceMover,
        layout: KVLayout,
        vocabulary: Vocabulary,
        slots: Slots,
        steps_ahead: int,
        grouper: PrefixGrouper | None = None,
        shares: AttentionShares | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.steps_ahead = steps_ahead
        self._forward = forward
        self._kv = kv
        self._packed = packed
        self._mover = mover
        self._layout = layout
        self._slots = slots
        self._device = kv.device
        self._grouper = grouper
        self._shares = shares
        self._decode_graphs: DecodeGraphs | None = None
        # By whether chunks may have packed pages; the second with decodes beside them.
        self._prefill_graphs: dict[bool, PrefillGraphs] = {}
        self._mixed_graphs: dict[bool, PrefillGraphs] = {}
        self._weights_bytes = 0

    def capture(
        self,
        max_sequences: int,
        max_tokens: int,
        weights_bytes: int,
        on_progress: Callable[[float], None],
    ) -> None:
        """Capture steps as CUDA graphs.

        Args:
            max_sequences: Of a batch.
            max_tokens: Prefill tokens of a batch.
            weights_bytes: Read by each pass.
            on_progress: Told how much is done, of 1.
        """
        padding, device = self._slots.padding, self._device
        sizes = max_tokens, max_sequences
        kinds = (False,) if self._packed is None else (False, True)

        def graphs(shapes: list[PrefillShape]) -> dict[bool, PrefillGraphs]:
            steps = {packed: partial(self._prefill, packed_chunks=packed) for packed in kinds}
            return {
                packed: PrefillGraphs(step, padding, shapes, device)
                for packed, step in steps.items()
            }

        # What a batch-invariant token gets may depend on the pass that it is in.
        mixed = {} if kernels.batch_invariant() else graphs(mixed_shapes(*sizes))
        prefills = graphs(prefill_shapes(*sizes))
        grouped = self._grouper is not None
        decode = DecodeGraphs(self._decode, padding, max_sequences, grouped, device)
        memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            parts: list[PrefillGraphs | DecodeGraphs]
            parts = [*mixed.values(), *prefills.values(), decode]
            for index, part in enumerate(parts):
                part.capture(memory, _part(on_progress, index / len(parts), 1 / len(parts)))
        self._decode_graphs, self._prefill_graphs, self._mixed_graphs = decode, prefills, mixed
        self._weights_bytes = weights_bytes

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copy pages, behind the steps launched so far and before the next."""
        self._mover.move(moves)

    def pack(self, moves: Sequence[PageMove]) -> None:
        """Write full pages as packed ones, in the same order."""
        self._mover.pack(moves)

    def launch(self, plan: StepPlan) -> Collect:
        """Start computing a plan; what this returns waits for the results."""
        with torch.inference_mode():
            self._slots.update(plan.chunks)
            self._copy(plan.chunks)
            if self._shares is not None:
                self._shares.begin(plan.decodes)
            if self._decode_graphs is None or plan.needs_results:
                return self._launch_pass(plan)
            together = self._launch_together(plan)
            if together is not None:
                return together
            # Decodes last: a pass may fail and be tried again, and a graph that has run has put the
            # next tokens into the slots.
            collects = []
            if plan.prefills:
                collects.append(self._launch_prefills(StepPlan([], plan.prefills)))
            size = self._decode_graphs.max_batch
            for first in range(0, len(plan.decodes), size):
                part = plan.decodes[first : first + size]
                collects.append(self._launch_decodes(self._decode_graphs, part))
        return lambda: joined([collect() for collect in collects])

    def _launch_together(self, plan: StepPlan) -> Collect | None:
        """Decodes and prefill chunks as one pass, where that takes less time than one for each."""
        if not (plan.decodes and plan.prefills and self._mixed_graphs):
            return None
        graphs = self._mixed_graphs[self._has_packed(plan.prefills)]
        shape = graphs.fitting(PrefillShape.of(plan))
        if shape is None:
            return None
        alone = StepPlan([], plan.prefills)
        prompts = self._prefill_shape(alone) or PrefillShape.of(alone)
        if not joins(shape, prompts.tokens, len(plan.decodes)):
            return None
        _, groups = self._grouped(plan.decodes)
        saved_pages = sum(group.saved_pages for group in groups)
        if saved_pages * self._layout.page_bytes > self._weights_bytes:
            return None
        return _replay(graphs, shape, plan)

    def _launch_decodes(self, graphs: DecodeGraphs, chunks: list[Chunk]) -> Collect:
        chunks, groups = self._grouped(chunks)
        requests = [chunk.request for chunk in chunks]
        results = graphs.run(
            [slot_of(request) for request in requests], [chunk.stop for chunk in chunks], groups
        )
        return fetch(results, requests, [], replayed=True, shared_prefix=bool(groups))

    def _grouped(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[PrefixGroup]]:
        """Decoding sequences in the order of their rows, and those that share a prefix."""
        graphs = self._decode_graphs
        if self._grouper is None or graphs is None or not graphs.takes_groups(len(chunks)):
            return chunks, []
        return self._grouper.group(chunks)

    def _launch_prefills(self, plan: StepPlan) -> Collect:
        shape = self._prefill_shape(plan)
        if shape is None:
            return self._launch_pass(plan)
        return _replay(self._prefill_graphs[self._has_packed(plan.prefills)], shape, plan)

    def _prefill_shape(self, plan: StepPlan) -> PrefillShape | None:
        """That of the graph for prefill chunks alone, if one suits them."""
        taken = PrefillShape.of(plan)
        shape = self._prefill_graphs[self._has_packed(plan.prefills)].fitting(taken)
        return shape if shape is not None and suits(shape, taken.tokens) else None

    def _launch_pass(self, plan: StepPlan) -> Collect:
        batch = build_batch(plan, self._slots, self._layout, self._device)
        packed = self._packed if self._has_packed(plan.chunks) else None
        logits = self._compute(batch.forward, batch.slots, packed)
        prompts = [(rows.request, self._prompt_logprobs(logits, rows)) for rows in batch.prompts]
        if not batch.sampled:
            return lambda: StepResult([], prompts)
        if len(batch.sampled) != len(logits):
            logits = logits[batch.sampled_rows]
        if plan.needs_results:
            tokens, sampled = sample_tokens(
                logits.float(), batch.sampled, batch.sampled_lens, self.vocabulary
            )
            self._slots.last_token.index_copy_(0, batch.sampled_slots, tokens)
            return lambda: StepResult(sampled, prompts)
        results = self._sample(logits, batch.sampled_slots, batch.sampled_lens)
        return fetch(results, batch.sampled, prompts)

    def _decode(
        self, slots: torch.Tensor, kv_lens: torch.Tensor, groups: torch.Tensor | None
    ) -> torch.Tensor:
        """One decode step of what is on the device alone; see `DecodeGraphs`."""
        sequences = slots.long()
        batch = decode_batch(sequences, kv_lens, groups, self._slots, self._layout)
        logits = self._compute(batch, sequences, self._packed)
        return self._sample(logits, sequences, kv_lens.long())

    def _compute(
        self, batch: ForwardBatch, slots: torch.Tensor, packed: PackedPages | None
    ) -> torch.Tensor:
        """Logits of a batch, whose sequences are in `slots`, [S] int64."""
        if self._shares is None or not batch.num_decodes:
            return self._forward(batch, self._kv, packed)
        table = batch.page_table[: batch.num_decodes]
        shares = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
        logits = self._forward(replace(batch, shares=shares), self._kv, packed)
        self._shares.add(slots[: batch.num_decodes], shares)
        return logits

    def _prefill(self, inputs: PrefillInputs, packed_chunks: bool) -> torch.Tensor:
        """One step of prefill chunks, and of decodes beside them; see `PrefillGraphs`."""
        batch = prefill_batch(inputs, packed_chunks, self._slots, self._layout)
        logits = self._compute(batch, inputs.slots.long(), self._packed)
        return self._sample(logits, inputs.sampled_slots.long(), inputs.sampled_lens.long())

    def _has_packed(self, chunks: list[Chunk]) -> bool:
        """Whether one of the sequences has packed pages: without, faster kernels do."""
        sequences = [chunk.request.sequence for chunk in chunks]
        return self._packed is not None and any(
            sequence is not None and sequence.packed_pages for sequence in sequences
        )

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw the next tokens and leave them in their slots: `[2, rows]`, tokens and failures."""
        params = self._slots.sampling(slots)
        tokens, failed = kernels.sample(
            logits[:, : self.vocabulary.size],
            params.seeds,
            positions,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
        )
        self._slots.last_token.index_copy_(0, slots, tokens)
        return torch.stack((tokens, failed.long()))

    def _copy(self, chunks: list[Chunk]) -> None:
        copies = [
            copy
            for chunk in chunks
            if chunk.request.sequence is not None
            for copy in chunk.request.sequence.copies
        ]
        if copies:
            self._mover.copy(copies)

    def _prompt_logprobs(
        self, logits: torch.Tensor, rows: PromptRows
    ) -> list[TokenLogprobs | None]:
        """For each prompt position of the rows, the log-probability of the token there.

        A position's logits tell of the token after it; so the first row also stands for the token
        before it, which nothing predicts if it is the prompt's first.
        """
        request = rows.request
        predicted = list(request.tokens[rows.position + 1 : rows.position + rows.count + 1])
        predicted = predicted[: request.prompt_length - rows.position - 1]
        found: list[TokenLogprobs | None] = [None] if rows.position == 0 else []
        if predicted:
            found += token_logprobs(
                logits[rows.row : rows.row + len(predicted)].float(),
                torch.tensor(predicted, device=logits.device),
                [request.sampling.prompt_logprobs or 0] * len(predicted),
                self.vocabulary,
            )
        return found


def _part(
    on_progress: Callable[[float], None], begin: float, share: float
) -> Callable[[float], None]:
    """Tells of a part's progress as that of the whole."""
    return lambda done: on_progress(begin + share * done)


def _replay(graphs: PrefillGraphs, shape: PrefillShape, plan: StepPlan) -> Collect:
    results = graphs.run(shape, plan)
    return fetch(results, [chunk.request for chunk in plan.sampled], [], replayed=True)
