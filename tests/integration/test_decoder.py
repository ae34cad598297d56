"""The decoder against transformers, on tiny random models of every family."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor

from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig, RopeScaling
from memd.models.decoder import Decoder, ForwardBatch
from memd.models.hub import ModelFiles, read_config
from memd.models.rope import stretched

PAGE_TOKENS = 16
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PHI3 = {"pad_token_id": None}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def longrope(original: int) -> dict[str, Any]:
    """Of Phi-3: other frequencies up to the original length than beyond."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.5],
        "long_factor": [1.0, 1.5, 4.0, 30.0],
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_theta": 1e4, **LINEAR}}),
    "llama-llama3": ("Llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "phi3": ("Phi3", PHI3),
    "phi3-window": ("Phi3", {**PHI3, "sliding_window": 32}),
    "phi3-partial": ("Phi3", {**PHI3, "partial_rotary_factor": 0.5}),
    "phi3-longrope": ("Phi3", {**PHI3, **longrope(64)}),
    "phi3-longrope-short": ("Phi3", {**PHI3, **longrope(512)}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ModelConfig, Decoder]:
    """A model of transformers with random parameters, biases included, and memd's decoder of it."""
    family, changes = MODELS[name]
    torch.manual_seed(0)
    hf_config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(hf_config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
    model.to(dtype)
    if family == "Phi3":
        return model, *read_back(model, dtype, 512 if name.endswith("short") else "auto")
    config = make_config(family.lower(), hf_config)
    tensors = {
        key.removeprefix("model."): value.clone() for key, value in model.state_dict().items()
    }
    return model, config, Decoder(config, tensors, torch.device("cpu"))


def read_back(
    model: Any, dtype: torch.dtype, max_len: int | Literal["auto"]
) -> tuple[ModelConfig, Decoder]:
    """The decoder of a model as its files tell it, where projections are fused."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        files = ModelFiles("m", directory=Path(directory))
        config = stretched(read_config(files), max_len)
        tensors = load_tensors(files, config, dtype, "cpu")
    return config, Decoder(config, tensors, torch.device("cpu"))


def make_config(architecture: str, hf: Any) -> ModelConfig:
    rope = hf.rope_parameters
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    layer_types = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    scaling = None
    if rope["rope_type"] != "default":
        scaling = RopeScaling(
            kind=rope["rope_type"],
            factor=rope["factor"],
            original_max_position=rope.get("original_max_position_embeddings"),
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_position=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        rope_dim=head_dim,
        attention_bias=getattr(hf, "attention_bias", architecture == "qwen2"),
        output_bias=getattr(hf, "attention_bias", False),
        mlp_bias=getattr(hf, "mlp_bias", False),
        qk_norm=architecture == "qwen3",
        tie_embeddings=hf.tie_word_embeddings,
        windows=tuple(
            getattr(hf, "sliding_window", None) if kind == "sliding_attention" else None
            for kind in layer_types
        ),
        dtype="float32",
    )


class Sequences:
    """Some sequences over a decoder and a KV memory of NaN, with pages handed out in random order.

    Blocks hold three pages and a rest that is not a whole page.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        count: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._decoder = decoder
        max_pages = -(-max_tokens // PAGE_TOKENS)
        num_blocks = -(-(count * max_pages + 1) // 3)
        page = (config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
        page_numel = torch.Size(page).numel()
        shape = (num_blocks, 3 * page_numel + page_numel // 3)
        memory = torch.full(shape, torch.nan, dtype=dtype)
        self.kv = memory[:, : 3 * page_numel].unflatten(1, (3, *page))
        generator = torch.Generator().manual_seed(1)
        pages = torch.randperm(num_blocks * 3, generator=generator)[: count * max_pages]
        self._table = pages.view(count, max_pages)
        self.lens = [0] * count

    def step(self, decodes: dict[int, int], prefills: dict[int, list[int]]) -> dict[int, Tensor]:
        """Logits of every new token, [tokens, vocab], by sequence."""
        chunks = {**{row: [token] for row, token in decodes.items()}, **prefills}
        positions = []
        for row, tokens in chunks.items():
            positions.append(torch.arange(self.lens[row], self.lens[row] + len(tokens)))
            self.lens[row] += len(tokens)
        owners = [row for row, tokens in chunks.items() for _ in tokens]
        at = torch.cat(positions)
        starts = [len(decodes)]
        for tokens in prefills.values():
            starts.append(starts[-1] + len(tokens))
        rows = list(chunks)
        most = max(-(-self.lens[row] // PAGE_TOKENS) for row in rows)
        table = self._table[rows, :most].clone()
        for entry, row in zip(table, rows, strict=True):
            entry[-(-self.lens[row] // PAGE_TOKENS) :] = 0
        batch = ForwardBatch(
            token_ids=torch.tensor([token for tokens in chunks.values() for token in tokens]),
            positions=at,
            write_pages=self._table[owners, at // PAGE_TOKENS],
            write_offsets=at % PAGE_TOKENS,
            page_table=table.int(),
            num_decodes=len(decodes),
            query_starts=int32(*starts),
            kv_lens=int32(*(self.lens[row] for row in rows)),
            logits_rows=torch.arange(len(at)),
        )
        logits = self._decoder.forward(batch, self.kv)
        return dict(zip(rows, logits.split([len(t) for t in chunks.values()]), strict=True))

    def prefill(self, row: int, tokens: list[int], chunk: int) -> Tensor:
        """Logits of a text computed in chunks, [tokens, vocab]."""
        parts = [
            self.step({}, {row: tokens[start : start + chunk]})[row]
            for start in range(0, len(tokens), chunk)
        ]
        return torch.cat(parts)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tokens(count: int, seed: int = 2) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator).tolist()


def relative_errors(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers_however_the_text_is_cut(name: str) -> None:
    model, config, decoder = make_model(name)
    tokens = random_tokens(300)
    expected = model(torch.tensor([tokens])).logits[0]
    for chunk in (300, 64, 16):
        logits = Sequences(config, decoder, 1, 300).prefill(0, tokens, chunk)
        assert relative_errors(logits, expected).max() < 1e-3, f"chunk {chunk}"
    sequences = Sequences(config, decoder, 1, 300)
    logits = torch.cat([sequences.step({0: token}, {})[0] for token in tokens])
    assert relative_errors(logits, expected).max() < 1e-3, "token by token"


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_decodes_and_prefills_share_a_step(name: str) -> None:
    model, config, decoder = make_model(name)
    texts = [random_tokens(length, seed) for seed, length in enumerate((90, 41, 70, 16))]
    sequences = Sequences(config, decoder, 4, 100)
    logits = [sequences.prefill(row, texts[row][:-20], 64) for row in (0, 1)]
    for step in range(20):
        decodes = {row: texts[row][len(texts[row]) - 20 + step] for row in (1, 0)}
        prefills = {row: texts[row][step * 4 : step * 4 + 4] for row in (2, 3)}
        out = sequences.step(decodes, {row: chunk for row, chunk in prefills.items() if chunk})
        for row in decodes:
            logits[row] = torch.cat((logits[row], out[row]))
        for row in (2, 3):
            if step == 0:
                logits.append(out[row])
            elif row in out:
                logits[row] = torch.cat((logits[row], out[row]))
    for text, actual in zip(texts, logits, strict=True):
        expected = model(torch.tensor([text])).logits[0]
        assert relative_errors(actual, expected).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(("mistral-window", length) for length in (*range(30, 36), 63, 64, 65)),
        *((name, 90) for name in MODELS if name.startswith("phi3")),
    ],
)
def test_generates_the_same_text(name: str, length: int) -> None:
    model, config, decoder = make_model(name)
    prompt = random_tokens(length, seed=length)
    sequences = Sequences(config, decoder, 1, length + 40)
    generated = [int(sequences.prefill(0, prompt, 16)[-1].argmax())]
    while len(generated) < 40:
        generated.append(int(sequences.step({0: generated[-1]}, {})[0].argmax()))
    logits = model(torch.tensor([prompt + generated])).logits[0]
    assert generated == logits[length - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn"])
def test_scaled_rope_at_long_range(name: str) -> None:
    model, config, decoder = make_model(name)
    tokens = random_tokens(40)
    positions = torch.arange(8970, 9010)
    expected = model(torch.tensor([tokens]), position_ids=positions[None]).logits[0]
    pages = torch.arange(3)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=positions,
        write_pages=torch.arange(40) // PAGE_TOKENS,
        write_offsets=torch.arange(40) % PAGE_TOKENS,
        page_table=pages[None].int(),
        num_decodes=0,
        query_starts=int32(0, 40),
        kv_lens=int32(40),
        logits_rows=torch.arange(40),
    )
    kv = Sequences(config, decoder, 1, 48).kv
    assert relative_errors(decoder.forward(batch, kv), expected).max() < 1e-3


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_bfloat16_loses_no_more_than_in_transformers(name: str) -> None:
    exact, _, _ = make_model(name)
    rounded, config, decoder = make_model(name, torch.bfloat16)
    tokens = random_tokens(50)
    expected = exact(torch.tensor([tokens])).logits[0]
    theirs = relative_errors(rounded(torch.tensor([tokens])).logits[0].float(), expected)
    sequences = Sequences(config, decoder, 1, 50, torch.bfloat16)
    logits = [sequences.prefill(0, tokens[:40], 16)]
    logits += [sequences.step({0: token}, {})[0] for token in tokens[40:]]
    assert relative_errors(torch.cat(logits), expected).mean() < 1.5 * theirs.mean()


def test_only_wanted_rows_are_computed() -> None:
    _, config, decoder = make_model("llama")
    tokens = random_tokens(20)
    whole = Sequences(config, decoder, 1, 20).prefill(0, tokens, 20)
    sequences = Sequences(config, decoder, 1, 20)
    pages = torch.tensor([2, 0])
    for rows in ([19], [], [3, 0, 3]):
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.arange(20),
            write_pages=pages[torch.arange(20) // PAGE_TOKENS],
            write_offsets=torch.arange(20) % PAGE_TOKENS,
            page_table=pages[None].int(),
            num_decodes=0,
            query_starts=int32(0, 20),
            kv_lens=int32(20),
            logits_rows=torch.tensor(rows, dtype=torch.int64),
        )
        logits = decoder.forward(batch, sequences.kv)
        assert logits.shape == (len(rows), config.vocab_size)
        torch.testing.assert_close(logits, whole[rows], rtol=1e-4, atol=1e-5)


def test_construction_empties_the_tensors() -> None:
    model, config, _ = make_model("llama")
    tensors = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    Decoder(config, tensors, torch.device("cpu"))
    assert not tensors
