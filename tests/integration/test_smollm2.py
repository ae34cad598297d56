"""The demo model against transformers on the same dequantised weights, float32."""

import gc
import random
from collections.abc import Iterator
from functools import cache, lru_cache

import demo
import pytest
import torch
from depth import DEEP
from memd_kernels import narrow_weight

from memd.config import dump
from memd.config_sources import load
from memd.engine.build import load_engine
from memd.engine.engine import Engine
from memd.engine.messages import Preempt, SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.checkpoint import load_tensors
from memd.models.decoder import Decoder, ForwardBatch
from memd.models.hub import read_config
from memd.models.tokenizer import Tokenizer, load_tokenizer
from memd.pool.audit import check

pytestmark = [demo.needs_demo_model, pytest.mark.slow]

# The deep profile tries longer prompts and outputs, and all prompts in each way.
OUTPUT_TOKENS = 64 if DEEP else 36  # more than two pages
NUM_PROMPTS = 20 if DEEP else 16
MAX_PROMPT_TOKENS = 200 if DEEP else 130
LONG_TEXT_TOKENS = 1000 if DEEP else 600
NUM_ALONE = 8 if DEEP else 3
NUM_CHUNKED = NUM_PROMPTS if DEEP else 8
TIE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def _give_memory_back() -> Iterator[None]:
    yield
    demo.transformers_model.cache_clear()
    weights.cache_clear()
    gc.collect()


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    found = load_tokenizer(demo.files(), read_config(demo.files()))
    assert found is not None
    return found


@lru_cache(maxsize=1)
def prompts() -> list[list[int]]:
    """Pieces of prose, some with common beginnings."""
    rng = random.Random(5)
    text = tokenizer().encode(demo.long_text())
    lengths = [rng.randrange(5, MAX_PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    starts = [rng.choice([0, 0, rng.randrange(3000)]) for _ in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Serving:
    """An inline engine on the demo model."""

    def __init__(self, *settings: str) -> None:
        self.port = InlinePort()
        tree = load(
            assignments=["model.dtype=float32", "engine.threads=1", *settings], environment={}
        )
        start = Start(dump(tree), 1, 49152, [2])
        self.engine: Engine
        self.engine, _ = load_engine(self.port, start)
        self.port.take()
        self.tokens: dict[str, list[int]] = {}

    def submit(self, request_id: str, prompt: list[int]) -> None:
        sampling = SamplingParams(
            seed=0, temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True
        )
        self.tokens[request_id] = []
        self.port.post(Submit(request_id, prompt, sampling))

    def step(self) -> None:
        self.engine.step()
        for message in self.port.take():
            for output in message.outputs if isinstance(message, StepReport) else ():
                self.tokens[output.request_id] += output.token_ids

    def finish(self) -> None:
        self.step()
        while self.engine.busy:
            self.step()
        assert check(self.engine.pool) == []
        assert self.engine.pool.pages.active == 0


@lru_cache(maxsize=1)
def weights() -> dict[str, torch.Tensor]:
    """As memd loads them, float32."""
    return load_tensors(demo.files(), read_config(demo.files()), torch.float32, "cpu")


def reference_logits(text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return demo.transformers_model()(torch.tensor([text])).logits[0]


@cache
def behind(prompt: tuple[int, ...], output: tuple[int, ...]) -> torch.Tensor:
    """How much less likely than the most likely one each token is; the same text is asked often."""
    logits = reference_logits([*prompt, *output])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return logits.max(-1).values - chosen


def assert_greedy(prompt: list[int], output: list[int]) -> None:
    """Each token is the most likely one after what comes before it, or tied with that."""
    assert len(output) == OUTPUT_TOKENS
    gaps = behind(tuple(prompt), tuple(output))
    assert gaps.max().item() < TIE, f"token {int(gaps.argmax())} of the output"


def test_weights_equal_transformers() -> None:
    state = demo.transformers_model().state_dict()
    assert {f"model.{name}" for name in weights()} == state.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in weights().items())


def test_all_matrices_are_read_in_one_byte_a_number_without_a_change() -> None:
    for name, weight in weights().items():
        if weight.ndim == 2:
            narrow = narrow_weight(weight)
            assert narrow is not None, name
            assert narrow.codes.itemsize == 1
            assert torch.equal(narrow.wide(), weight), name


def test_logits_at_every_position_of_a_long_text() -> None:
    text = tokenizer().encode(demo.long_text())[:LONG_TEXT_TOKENS]
    decoder = Decoder(read_config(demo.files()), dict(weights()), torch.device("cpu"))  # it pops
    pages = -(-len(text) // 16)
    kv = torch.full((pages, 1, 30, 2, 3, 16, 64), torch.nan)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    expected = reference_logits(text)
    for start in range(0, len(text), 250):
        positions = torch.arange(start, min(start + 250, len(text)))
        batch = ForwardBatch(
            token_ids=torch.tensor(text)[positions],
            positions=positions,
            write_pages=table[positions // 16],
            write_offsets=positions % 16,
            page_table=table[None].int(),
            num_decodes=0,
            query_starts=torch.tensor([0, len(positions)], dtype=torch.int32),
            kv_lens=(positions[-1:] + 1).int(),
            logits_rows=torch.arange(len(positions)),
        )
        with torch.inference_mode():
            logits = decoder.forward(batch, kv)
        wanted = expected[positions]
        error = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max().item() < 1e-3


def test_greedy_text_alone_and_resumed() -> None:
    """Each prompt by itself, two of them preempted twice on the way."""
    serving = Serving("memory.limit=65536 tokens")
    for index, prompt in enumerate(prompts()[:NUM_ALONE]):
        name = f"alone {index}"
        serving.submit(name, prompt)
        for mark in (11, 25) if index < 2 else ():
            while len(serving.tokens[name]) < mark:
                serving.step()
            serving.port.post(Preempt(mark, name))
        serving.finish()
        assert_greedy(prompt, serving.tokens[name])
    assert serving.engine.snapshot().preemptions == 4


@pytest.mark.parametrize(
    ("setting", "number"),
    [
        pytest.param("engine.max_sequences=16", NUM_PROMPTS, id="batch of 16"),
        pytest.param("engine.max_batch_tokens=64", NUM_CHUNKED, id="chunks of 64"),
        pytest.param("memory.limit=1024 tokens", NUM_PROMPTS, id="pool of 1,024 tokens"),
    ],
)
def test_greedy_text_in_company(setting: str, number: int) -> None:
    serving = Serving("memory.limit=65536 tokens", setting)
    company = prompts()[:number]
    for index, prompt in enumerate(company):
        serving.submit(str(index), prompt)
    serving.finish()
    for index, prompt in enumerate(company):
        assert_greedy(prompt, serving.tokens[str(index)])
    if "memory.limit" in setting:
        snapshot = serving.engine.snapshot()
        assert snapshot.preemptions > 0
        assert sum(snapshot.pool.evicted_pages.values()) > 0
