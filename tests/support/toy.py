"""An engine around a model whose next token is a hash of every token it finds in its pages.

It reads the context back through the page table, so one wrong page, copy or offset changes all that
follows: what the pool, scheduler and batch do is checked by comparing texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from inline_copier import InlineCopier
from inline_disk import InlineDisk
from memd_kernels.formats import PackedPages

from memd.config_sources import load
from memd.engine.build import assemble_engine
from memd.engine.messages import (
    ArmFaults,
    Output,
    Reply,
    SamplingParams,
    Start,
    StepReport,
    Submit,
    ToEngine,
)
from memd.engine.port import InlinePort
from memd.engine.snapshot_types import EngineSnapshot
from memd.faults import FaultPlan
from memd.models.config import ModelConfig
from memd.models.decoder import ForwardBatch
from memd.models.spans import narrowed
from memd.pool.audit import check

VOCAB = 97
EOS = 96
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=1,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position=4096,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    rope_dim=2,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_embeddings=True,
    windows=(None,),
    dtype="float32",
)


def next_token(context: Sequence[int]) -> int:
    """What follows a context; never the end token."""
    value = 7
    for token in context:
        value = (value * 131 + token + 1) % 1_000_003
    return value % (VOCAB - 1)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def logits_after(context: Sequence[int]) -> torch.Tensor:
    """Logits `[VOCAB]` after a context: the next token on top, the others falling off behind it."""
    return -0.5 * ((torch.arange(VOCAB) - next_token(context)) % VOCAB).float()


@dataclass
class ToyModel:
    """The forward function; fails or gives NaN for sequences that hold a given token."""

    fail_on: set[int] = field(default_factory=set)
    nan_on: set[int] = field(default_factory=set)
    forwards: int = 0
    computed_tokens: int = 0

    def forward(
        self, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        self.write(batch, kv)
        self.forwards += 1
        self.computed_tokens += len(batch.token_ids)
        rows = []
        chunk_starts = batch.query_starts.tolist()
        starts = [*range(batch.num_decodes), *chunk_starts]
        for row in batch.logits_rows.tolist():
            sequence = max(index for index, start in enumerate(starts[:-1] or [0]) if start <= row)
            if row < batch.num_decodes:
                sequence = row
            length = int(batch.positions[row]) + 1
            table = batch.page_table[sequence]
            context = self.read(table, length, kv, packed)
            if self.fail_on & set(context):
                raise RuntimeError("told to fail")
            logits = logits_after(context)
            rows.append(logits * torch.nan if self.nan_on & set(context) else logits)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def write(self, batch: ForwardBatch, kv: torch.Tensor) -> None:
        """Put the batch's tokens into their pages."""
        pages = kv.flatten(0, 1)[:, 0, 0, 0, :, 0]  # [pages, page_tokens]
        pages[batch.write_pages, batch.write_offsets] = batch.token_ids.float()

    def read(
        self, table: torch.Tensor, length: int, kv: torch.Tensor, packed: PackedPages | None
    ) -> list[int]:
        """The tokens in the pages of a sequence."""
        pages = kv.flatten(0, 1)[:, 0, 0, 0, :, 0]
        return [int(token) for token in pages[table].flatten()[:length]]


class Harness:
    """An inline engine, driven step by step, and what it has said so far.

    What nobody has written is NaN in all its pages, unless `faults` say otherwise.

    Attributes:
        steps_ahead: Steps that engines made from now on launch before reading the first's results.
        config: Of the model.
    """

    steps_ahead = 0
    config = CONFIG

    def __init__(
        self,
        *settings: str,
        model: ToyModel | None = None,
        faults: FaultPlan | None = None,
        vocab_limit: int = VOCAB,
    ) -> None:
        self.model = model or ToyModel()
        self.faults = faults or FaultPlan(nan_in_free_pages=True)
        self.port = InlinePort()
        self.time = 0.0
        self.outputs: dict[str, list[Output]] = {}
        self.replies: dict[int, Reply] = {}
        self.last_snapshot: EngineSnapshot | None = None
        self._serial = 0
        self.disk = InlineDisk()
        defaults = (
            *("memory.page_tokens=16", "memory.limit=1024 tokens", "memory.block_size=4096B"),
            "debug.faults=true",
        )
        self.settings = load(assignments=[*defaults, *settings], environment={})
        start = Start({}, 1, vocab_limit, [EOS])
        self.engine, self.ready = assemble_engine(
            self.port,
            start,
            self.settings,
            narrowed(self.config, self.settings.kv.window, self.settings.kv.sinks),
            self.model.forward,
            torch.device("cpu"),
            torch.float32,
            "toy",
            copier=InlineCopier(),
            disk=self.disk,
            clock=self.clock,
            steps_ahead=self.steps_ahead,
        )
        self.model.computed_tokens = 0  # by warming up
        self.send(ArmFaults(10**6, self.faults))

    def clock(self) -> float:
        self.time += 1e-4
        return self.time

    def submit(self, prompt: Sequence[int], max_tokens: int = 8, **more: object) -> str:
        """Queue a request; sampling, `salt`, `priority`, `tenant`, `request_id` by keyword."""
        self._serial += 1
        request_id = str(more.pop("request_id", f"r{self._serial}"))
        salt, priority = str(more.pop("salt", "")), int(str(more.pop("priority", 0)))
        tenant = str(more.pop("tenant", ""))
        options = {"seed": 1, "temperature": 0.0, **more}
        sampling = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        self.send(Submit(request_id, list(prompt), sampling, salt, priority, tenant))
        return request_id

    def send(self, *messages: ToEngine) -> None:
        self.port.post(*messages)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            problems = check(self.engine.pool)
            assert problems == [], problems
            for message in self.port.take():
                assert isinstance(message, StepReport)
                for output in message.outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
                for reply in message.replies:
                    self.replies[reply.command_id] = reply
                self.last_snapshot = message.snapshot or self.last_snapshot

    def finish(self, limit: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.engine.busy:
                return
        raise AssertionError(f"still busy after {limit} steps")

    def ask(self, command: ToEngine) -> Reply:
        self.send(command)
        self.step()
        return self.replies.pop(command.command_id)  # type: ignore[union-attr]

    def arm(self, **changes: object) -> None:
        """Change some of the faults that are armed."""
        self.faults = msgspec.structs.replace(self.faults, **changes)
        assert self.ask(ArmFaults(10**6, self.faults)).error is None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.token_ids]

    def end_of(self, request_id: str) -> str | None:
        """Why a request has ended, if it has."""
        return self.outputs[request_id][-1].finish_reason

    def end(self, request_id: str) -> Output:
        """The last output; asserts that it is the only one that ends the request."""
        outputs = self.outputs[request_id]
        assert [output.finish_reason is not None for output in outputs].count(True) == 1
        assert outputs[-1].finish_reason is not None
        return outputs[-1]

    def cached(self, request_id: str) -> int:
        first = self.outputs[request_id][0].cached_tokens
        assert first is not None
        return first

    def generate(self, prompt: Sequence[int], max_tokens: int = 8, **more: object) -> list[int]:
        request_id = self.submit(prompt, max_tokens, **more)
        self.finish()
        return self.tokens(request_id)

    def assert_idle(self) -> None:
        """Nothing runs, nothing is held, and everything adds up."""
        snapshot = self.engine.snapshot()
        assert snapshot.running == 0
        assert sum(snapshot.waiting.values()) == 0
        assert snapshot.pool.active_pages == 0
        assert (
            snapshot.pool.free_pages + snapshot.pool.cached_pages + snapshot.pool.quarantined_pages
            == snapshot.pool.capacity_pages
        )
        assert check(self.engine.pool) == []
