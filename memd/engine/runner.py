"""Runs step plans on the device: copies, forward pass, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import memd_kernels as kernels
import torch
from memd_kernels.formats import PackedPages

from memd.engine.attention_shares import AttentionShares
from memd.engine.batch import PromptRows, build_batch, decode_batch, prefill_batch
from memd.engine.device_mover import DeviceMover
from memd.engine.graphs import DecodeGraphs, PrefillGraphs, PrefillInputs
from memd.engine.messages import TokenLogprobs
from memd.engine.plan import Chunk, StepPlan
from memd.engine.prefix_groups import PrefixGroup, PrefixGrouper
from memd.engine.request import Request
from memd.engine.sampling import Sampled, Vocabulary, sample_tokens, token_logprobs
from memd.engine.slots import Slots, slot_of
from memd.models.decoder import ForwardBatch
from memd.pool.defrag import PageMove
from memd.pool.layout import KVLayout

Collect = Callable[[], "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step produced: next tokens, and log-probabilities of prompt tokens where asked for.

    Args:
        replayed: All of it ran from graphs.
        shared_prefix: A prefix was read once for several sequences.
    """

    sampled: list[Sampled]
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs | None]]]
    replayed: bool = False
    shared_prefix: bool = False


class Forward(Protocol):
    """A model."""

    def __call__(
        self, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        """Logits `[rows, vocab]`, float32; see `memd.models.decoder.Decoder.forward`."""


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
    from one each. On a CUDA device nothing waits for the device between
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
        self._prefill_graphs: dict[bool, PrefillGraphs] = {}  # by whether pages may be packed

    def capture(
        self, max_sequences: int, max_tokens: int, on_progress: Callable[[float], None]
    ) -> None:
        """Capture steps as CUDA graphs, for batches of so many sequences and prefill tokens."""
        padding, device = self._slots.padding, self._device
        kinds = (False,) if self._packed is None else (False, True)
        prefills = {
            mixed: PrefillGraphs(
                partial(self._prefill, packed=self._packed if mixed else None),
                padding,
                max_tokens,
                max_sequences,
                device,
            )
            for mixed in kinds
        }
        decode = DecodeGraphs(
            self._decode, padding, max_sequences, self._grouper is not None, device
        )
        memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            share = 0.5 / len(prefills)
            for mixed, graphs in prefills.items():
                graphs.capture(memory, _part(on_progress, mixed * share, share))
            decode.capture(memory, _part(on_progress, 0.5, 0.5))
        self._decode_graphs, self._prefill_graphs = decode, prefills

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
            # Decodes last: a pass may fail and be tried again, and a graph that has run has put the
            # next tokens into the slots.
            collects = []
            if plan.prefills:
                collects.append(self._launch_prefills(plan.prefills))
            size = self._decode_graphs.max_batch
            for first in range(0, len(plan.decodes), size):
                part = plan.decodes[first : first + size]
                collects.append(self._launch_decodes(self._decode_graphs, part))
        return lambda: _joined([collect() for collect in collects])

    def _launch_decodes(self, graphs: DecodeGraphs, chunks: list[Chunk]) -> Collect:
        groups: list[PrefixGroup] = []
        if self._grouper is not None and graphs.takes_groups(len(chunks)):
            chunks, groups = self._grouper.group(chunks)
        requests = [chunk.request for chunk in chunks]
        results = graphs.run(
            [slot_of(request) for request in requests], [chunk.stop for chunk in chunks], groups
        )
        return _fetch(results, requests, [], replayed=True, shared_prefix=bool(groups))

    def _launch_prefills(self, chunks: list[Chunk]) -> Collect:
        graphs = self._prefill_graphs[self._packed_pages_of(chunks) is not None]
        size = graphs.fitting(chunks)
        if size is None:
            return self._launch_pass(StepPlan([], chunks))

        # Those that sample first: their results are then the first ones.
        def sampled(chunk: Chunk) -> bool:
            return chunk.samples and chunk.request.sampling.max_tokens > 0

        chunks = sorted(chunks, key=sampled, reverse=True)
        requests = [chunk.request for chunk in chunks if sampled(chunk)]
        results = graphs.run(size, chunks)
        return _fetch(results[:, : len(requests)], requests, [], replayed=True)

    def _launch_pass(self, plan: StepPlan) -> Collect:
        batch = build_batch(plan, self._slots, self._layout, self._device)
        packed = self._packed_pages_of(plan.chunks)
        logits = self._compute(batch.forward, batch.slots, packed)
        prompts = [(rows.request, self._prompt_logprobs(logits, rows)) for rows in batch.prompts]
        if not batch.sampled:
            return lambda: StepResult([], prompts)
        if len(batch.sampled) != len(logits):
            logits = logits[batch.sampled_rows]
        if plan.needs_results:
            tokens, sampled = sample_tokens(
                logits, batch.sampled, batch.sampled_lens, self.vocabulary
            )
            self._slots.last_token.index_copy_(0, batch.sampled_slots, tokens)
            return lambda: StepResult(sampled, prompts)
        results = self._sample(logits, batch.sampled_slots, batch.sampled_lens)
        return _fetch(results, batch.sampled, prompts)

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

    def _prefill(self, inputs: PrefillInputs, packed: PackedPages | None) -> torch.Tensor:
        """One step of prefill chunks; see `PrefillGraphs`."""
        batch = prefill_batch(inputs, self._slots, self._layout)
        logits = self._forward(batch, self._kv, packed)
        return self._sample(logits, inputs.sampled_slots.long(), inputs.lens.long())

    def _packed_pages_of(self, chunks: list[Chunk]) -> PackedPages | None:
        """The packed pages, where a sequence has some: without, faster kernels do."""
        if self._packed is None:
            return None
        sequences = [chunk.request.sequence for chunk in chunks]
        some = any(sequence is not None and sequence.packed_pages for sequence in sequences)
        return self._packed if some else None

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
                logits[rows.row : rows.row + len(predicted)],
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


def _fetch(
    results: torch.Tensor,
    requests: list[Request],
    prompts: list[tuple[Request, list[TokenLogprobs | None]]],
    replayed: bool = False,
    shared_prefix: bool = False,
) -> Collect:
    """Bring `[2, len(requests)]` tokens and failures to the host, without waiting for them."""
    arrived = None
    if results.is_cuda:
        on_host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        results = on_host.copy_(results, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def collect() -> StepResult:
        if arrived is not None:
            arrived.synchronize()
        tokens, failed = results.tolist()
        return StepResult(
            [
                Sampled(request, token, None, bool(failure))
                for request, token, failure in zip(requests, tokens, failed, strict=True)
            ],
            prompts,
            replayed,
            shared_prefix,
        )

    return collect


def _joined(results: list[StepResult]) -> StepResult:
    return StepResult(
        [sampled for result in results for sampled in result.sampled],
        [prompt for result in results for prompt in result.prompt_logprobs],
        all(result.replayed for result in results),
        any(result.shared_prefix for result in results),
    )
