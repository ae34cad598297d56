"""Windows, sinks and scaled positions of real models through the engine, against other code."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from inline_copier import InlineCopier
from torch import Tensor

from memd.config_sources import load
from memd.engine.build import assemble_engine
from memd.engine.messages import SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.hf_config import from_hf
from memd.models.rope import Rotary
from memd.models.spans import narrowed, widest
from memd.pool.audit import check

from .test_decoder import make_model, random_tokens


class Inline:
    """An engine over a decoder; knows what its sequences held at most."""

    def __init__(self, config: ModelConfig, decoder: Decoder, *settings: str) -> None:
        self._port = InlinePort()
        defaults = "memory.page_tokens=16", "memory.limit=1024 tokens", "memory.block_size=65536B"
        self.engine, self.ready = assemble_engine(
            self._port,
            Start({}, 1, config.vocab_size, []),
            load(assignments=[*defaults, *settings], environment={}),
            config,
            decoder.forward,
            torch.device("cpu"),
            torch.float32,
            "model",
            copier=InlineCopier(),
        )
        self.most_pages = 0

    def generate(self, prompt: list[int], count: int, **more: Any) -> tuple[list[int], list[float]]:
        """The greedy continuation, and log-probabilities of the prompt's tokens if asked for."""
        sampling = SamplingParams(max_tokens=count, seed=1, temperature=0.0, **more)
        self._port.post(Submit("one", prompt, sampling))
        tokens: list[int] = []
        logprobs: list[float] = []
        ended = False
        while not ended:
            self.engine.step()
            assert check(self.engine.pool) == []
            self.most_pages = max(self.most_pages, self.engine.pool.pages.active)
            for message in self._port.take():
                assert isinstance(message, StepReport)
                for output in message.outputs:
                    assert output.error is None
                    tokens += output.token_ids
                    logprobs += [each.logprob for each in output.prompt_logprobs or [] if each]
                    ended = ended or output.finish_reason is not None
        return tokens, logprobs


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
@pytest.mark.parametrize("length", [*range(30, 36), 63, 64, 65])
def test_c068_edges_of_a_models_window(name: str, length: int) -> None:
    """Where all layers have a window its pages are dropped; where some have, all are kept."""
    model, config, decoder = make_model(name)
    inline = Inline(config, decoder, "engine.max_batch_tokens=16")
    prompt = random_tokens(length, seed=length)
    generated, _ = inline.generate(prompt, 40)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated])).logits[0]
    assert generated == logits[length - 1 : -1].argmax(-1).tolist()
    dropped = inline.engine.snapshot().pool.dropped_pages["recency"]
    assert dropped == (max(0, length + 39 - 32) // 16 if name == "mistral-window" else 0)


def test_a_models_window_needs_no_memory_for_what_it_has_passed() -> None:
    model, config, decoder = make_model("mistral-window")
    inline = Inline(config, decoder, "memory.limit=192 tokens")
    prompt = random_tokens(500)
    generated, _ = inline.generate(prompt, 60)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated])).logits[0]
    assert generated == logits[499:-1].argmax(-1).tolist()
    assert inline.most_pages <= 12


class Streaming:
    """StreamingLLM as its paper tells it, on transformers' parameters, a token at a time.

    Keys are kept without rotation and are rotated to their places in the cache at each step: other
    arithmetic than memd's, whose keys stay as they were written.
    """

    def __init__(self, model: Any, rotary: Rotary, window: int, sinks: int) -> None:
        self._model, self._rotary = model.model.double(), rotary
        self._head = model.lm_head
        self._window, self._sinks = window, sinks
        self._cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.model.layers]

    def logits(self, token: int) -> Tensor:
        hidden = self._model.embed_tokens(torch.tensor([token]))
        for layer, cache in zip(self._model.layers, self._cache, strict=True):
            hidden = hidden + self._attend(layer, layer.input_layernorm(hidden), cache)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self._head(self._model.norm(hidden))[0]

    def _attend(self, layer: Any, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        attention = layer.self_attn
        dim = attention.head_dim
        q, k, v = (
            projection(x).view(-1, dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cache.append((k, v))
        if len(cache) > self._sinks + self._window:
            del cache[self._sinks]
        places = torch.arange(len(cache))
        keys = self._turn(torch.stack([k for k, _ in cache], 1), places)
        values = torch.stack([v for _, v in cache], 1)
        q = self._turn(q[:, None], places[-1:]).unflatten(0, (len(keys), -1))[:, :, 0]
        scores = torch.einsum("hgd,hkd->hgk", q, keys) * dim**-0.5
        mixed = torch.einsum("hgk,hkd->hgd", scores.softmax(-1), values)
        return attention.o_proj(mixed.reshape(1, -1))

    def _turn(self, heads: Tensor, places: Tensor) -> Tensor:
        cos, sin = (angle.double() for angle in self._rotary.angles(places))
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("name", ["llama", "llama-llama3", "llama-yarn"])
@pytest.mark.parametrize(("window", "sinks"), [(32, 4), (20, 17), (48, 0)])
def test_window_with_sinks_is_that_of_streaming_llm(name: str, window: int, sinks: int) -> None:
    model, config, _ = make_model(name)
    tensors = {
        key.removeprefix("model."): value.clone() for key, value in model.state_dict().items()
    }
    config = narrowed(config, window, sinks)
    decoder = Decoder(config, tensors, torch.device("cpu"))
    inline = Inline(config, decoder, "engine.max_batch_tokens=100")
    prompt = random_tokens(150)
    generated, logprobs = inline.generate(prompt, 60, prompt_logprobs=0)
    streaming = Streaming(model.double(), Rotary(config, torch.device("cpu")), window, sinks)
    with torch.inference_mode():
        logits = torch.stack([streaming.logits(token) for token in prompt + generated[:-1]])
    assert generated == logits[149:].argmax(-1).tolist()
    expected = logits.log_softmax(-1)[range(149), prompt[1:]]
    torch.testing.assert_close(torch.tensor(logprobs).double(), expected, rtol=1e-3, atol=1e-3)
    assert inline.engine.snapshot().pool.dropped_pages["recency"] > 0


def test_a_text_is_the_same_wherever_it_stands() -> None:
    """Far out positions lose nothing that matters: after a window's length only distances count."""
    _, config, decoder = make_model("llama")
    del decoder
    rotary = Rotary(narrowed(config, 32, 4), torch.device("cpu"))
    near, far = torch.arange(100, 132), torch.arange(10**6, 10**6 + 32)
    q, k = torch.randn(2, 32, 8)

    def scores(places: Tensor) -> Tensor:
        cos, sin = rotary.angles(places)
        turned = []
        for heads in (q, k):
            first, second = heads.chunk(2, -1)
            turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
        return turned[0] @ turned[1].T

    torch.testing.assert_close(scores(far), scores(near), rtol=0, atol=0.15)


def test_narrowed_layers() -> None:
    _, some, _ = make_model("qwen2-window")  # None, 32, 32
    assert widest(some) == (None, 0)
    assert narrowed(some, None, 4) is some
    wide = narrowed(some, 48, 4)
    assert [wide.span(layer) for layer in range(3)] == [(48, 4), (32, 0), (32, 0)]
    assert widest(wide) == (48, 4)
    assert [narrowed(some, 16, 2).span(layer) for layer in range(3)] == [(16, 2)] * 3
    _, every, _ = make_model("mistral-window")
    assert widest(every) == (32, 0)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn-mscale": {
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "default": {},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("position", [0, 1, 4095, 8191, 8192, 32767, 40000, 131071])
def test_angles_are_those_of_transformers_at_every_length(name: str, position: int) -> None:
    rope = {"rope_type": name.partition("-")[0], "rope_theta": 5e5, **SCALINGS[name]}
    hf = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters=rope,
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf)
    places = torch.tensor([position])
    cos, sin = theirs(torch.zeros(1, 1, 64), places[None])
    mine = Rotary(from_hf(hf.to_dict()), torch.device("cpu")).angles(places)
    for own, their in zip(mine, (cos, sin), strict=True):
        torch.testing.assert_close(own, their[0, :, :32], rtol=0, atol=1e-6 + 2e-7 * position)


def test_the_settings_of_a_window_are_part_of_the_namespace(tmp_path: Path) -> None:
    from memd.engine.build import fingerprint
    from memd.models.hub import ModelFiles

    _, config, _ = make_model("llama")
    files = ModelFiles("m", directory=tmp_path)
    spans = (None, 4), (32, 4), (32, 5), (33, 4)
    prints = {fingerprint(files, narrowed(config, *span)) for span in spans}
    assert len(prints) == len(spans)
