"""KV heads that are alike are found, and one of them serves for all: same logits, less memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_model
from typer.testing import CliRunner

from memd.analysis.attention_patterns import PatternSimilarity
from memd.analysis.joint_heads import joint_heads
from memd.analysis.shared_heads import Found, HeadAnalysis, choose
from memd.analysis.text_pass import run_text
from memd.cli import app
from memd.config import build, dump
from memd.engine.build import load_engine
from memd.engine.messages import Start
from memd.engine.port import InlinePort
from memd.errors import ModelError
from memd.evaluate.policy import KVPolicy
from memd.evaluate.sequence import PagedSequence
from memd.models.checkpoint import expected_shapes
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.head_plan import HeadPlan, key_pairs, read_plan, write_plan
from memd.models.hub import read_config, resolve
from memd.models.shared_heads import share_heads

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 8, 4, 8
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=258,
    hidden_size=64,
    intermediate_size=80,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    max_position=512,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    rope_dim=DIM,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_embeddings=True,
    windows=(None, None),
    dtype="float32",
)
FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "output_bias": True},
    "normalised": {"qk_norm": True},
    "half-rotated": {"rope_dim": DIM // 2},
}
Tensors = dict[str, torch.Tensor]


def tensors_of(
    family: str, same: dict[int, int], turned: bool = False
) -> tuple[ModelConfig, Tensors]:
    """A random model in which KV heads are copies of others, in every layer.

    Args:
        family: Of FAMILIES.
        same: Head: the one it is a copy of.
        turned: The keys of copies are turned and scaled, their values are in another basis.
    """
    config = replace(CONFIG, **FAMILIES[family])
    chance = torch.Generator().manual_seed(1)
    tensors = {}
    for key, shape in expected_shapes(config).items():
        tensors[key] = torch.randn(shape, generator=chance) * 0.2 + ("norm" in key)
        if ".k_proj." not in key and ".v_proj." not in key:
            continue
        heads = tensors[key].unflatten(0, (KV_HEADS, DIM))
        for copy, of in same.items():
            heads[copy] = heads[of]
            if turned and "k_proj" in key:
                low, high = heads[of].split(DIM // 2)
                heads[copy] = torch.cat((1.2 * low - 1.6 * high, 1.6 * low + 1.2 * high))
            if turned and "v_proj" in key:
                heads[copy] = -heads[of].flip(0)
    return config, tensors


def pages_for(config: Any, num_tokens: int) -> PagedSequence:
    return PagedSequence(config, KVPolicy(), 16, num_tokens, torch.float32, CPU)


def logits_of(config: Any, tensors: dict, tokens: torch.Tensor) -> torch.Tensor:
    decoder = Decoder(config, {key: value.clone() for key, value in tensors.items()}, CPU)
    found: list[torch.Tensor] = []
    sequence = pages_for(config, len(tokens))
    with torch.inference_mode():
        run_text(decoder, tokens, sequence, lambda start, logits: found.append(logits))
    return torch.cat(found)


def directory_of(path: Path, config: Any, tensors: dict) -> Path:
    """The model with the tokenizer of the tiny one."""
    write_model(path)
    names = {
        "vocab_size": 258,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    written = json.loads((path / "config.json").read_text()) | names
    (path / "config.json").write_text(json.dumps(written))
    named = {f"model.{key}": value for key, value in tensors.items()}
    save_file(named, path / "model.safetensors")
    return path


def analyse(path: Path, threshold: float = 0.999, kv_heads: int | None = None) -> Found:
    files = resolve(str(path))
    config = read_config(files)
    tokens = torch.randint(0, 258, (128,), generator=torch.Generator().manual_seed(2)).tolist()
    return HeadAnalysis(files, config, CPU, torch.float32).run(tokens, threshold, kv_heads)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads 0 and 2, and 1 and 3, are the same."""
    config, tensors = tensors_of("plain", {2: 0, 3: 1})
    # Queries of copies ask what those of the first ask, so that patterns are alike as well.
    for key, value in tensors.items():
        if "q_proj" in key:
            value[4 * DIM : 8 * DIM] = value[: 4 * DIM]
    return directory_of(tmp_path_factory.mktemp("models") / "pairs", config, tensors)


@pytest.fixture(scope="module")
def found(pairs: Path) -> Found:
    return analyse(pairs)


def test_identical_heads_are_found_and_sharing_costs_nothing(found: Found):
    assert found.chosen is not None
    assert found.chosen.kv_heads == 2
    assert found.chosen.clusters == (((0, 2), (1, 3)),) * 2
    assert found.chosen.query_heads == HEADS  # no head is added
    assert found.chosen.least_similarity == pytest.approx(1.0, abs=1e-4)
    assert found.shared_perplexity == pytest.approx(found.perplexity, rel=1e-4)
    assert min(min(map(min, layer)) for layer in found.similarities) >= 0


@pytest.mark.parametrize(
    ("family", "turned"), [*((name, False) for name in FAMILIES), ("plain", True), ("biases", True)]
)
def test_one_head_serves_for_copies_with_the_same_logits(family: str, turned: bool):
    """Turned copies as well, but where keys or parts of them can only be averaged."""
    config, tensors = tensors_of(family, {3: 1, 2: 0}, turned)
    check_free(config, tensors, (((0, 2), (1, 3)),) * 2)


def test_uneven_clusters_and_layers_that_differ_are_filled_up_with_heads_of_nothing():
    config, tensors = tensors_of("biases", {2: 0})
    for key in tensors:
        if "layers.1" not in key or ("k_proj" not in key and "v_proj" not in key):
            continue
        heads = tensors[key].unflatten(0, (KV_HEADS, DIM))
        heads[2], heads[3] = heads[3].clone(), heads[1]  # here 1 and 3 are the same
    shared = check_free(config, tensors, (((0, 2), (1,), (3,)), ((0,), (1, 3), (2,))))
    assert (shared.num_kv_heads, shared.num_heads) == (3, 3 * 2 * 2)


def test_all_heads_become_one():
    config, tensors = tensors_of("plain", {1: 0, 2: 0, 3: 0})
    shared = check_free(config, tensors, (((0, 1, 2, 3),),) * 2)
    assert (shared.num_kv_heads, shared.num_heads) == (1, HEADS)


def check_free(config: Any, tensors: dict, clusters: Any) -> Any:
    """Join heads as a text says, and compare logits on another text."""
    chance = torch.Generator().manual_seed(3)
    text, other = torch.randint(0, config.vocab_size, (2, 40), generator=chance)
    sequence = pages_for(config, len(text))
    kv = sequence.kv
    decoder = Decoder(config, {key: value.clone() for key, value in tensors.items()}, CPU)
    with torch.inference_mode():
        run_text(decoder, text, sequence)
    parts = []
    for layer in range(config.num_layers):
        keys, values = kv[0, :, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
        parts.append(joint_heads(keys, values, clusters[layer], key_pairs(config)))
    values, keys = (tuple(each) for each in zip(*parts, strict=True))
    plan = HeadPlan("m", "w", KV_HEADS, DIM, key_pairs(config), clusters, values, keys)
    changed = {key: value.clone() for key, value in tensors.items()}
    shared = share_heads(changed, config, plan)
    expected = logits_of(config, tensors, other)
    torch.testing.assert_close(logits_of(shared, changed, other), expected, rtol=1e-3, atol=1e-3)
    return shared


def test_heads_that_differ_are_not_shared_unless_asked_and_then_cost_something(tmp_path: Path):
    config, tensors = tensors_of("plain", {})
    path = directory_of(tmp_path / "apart", config, tensors)
    apart = analyse(path)
    assert apart.chosen is apart.plan is apart.shared_perplexity is None
    assert [option.kv_heads for option in apart.options] == [3, 2, 1]
    assert choose(apart.options, 0.0) == apart.options[-1]
    forced = analyse(path, kv_heads=2)
    assert forced.shared_perplexity != pytest.approx(forced.perplexity, rel=1e-3)


def test_patterns_are_those_of_attention_by_hand():
    """Against the definition, with a window and chunks that are not alone."""
    config, tensors = tensors_of("plain", {})
    config = replace(config, windows=(None, 7))
    tokens = torch.randint(0, config.vocab_size, (300,), generator=torch.Generator().manual_seed(4))
    sequence = pages_for(config, len(tokens))
    kv = sequence.kv
    seen: list[list[torch.Tensor]] = [[], []]
    patterns = PatternSimilarity(config, kv)

    def watch(layer: int, queries: torch.Tensor) -> None:
        seen[layer].append(queries.clone())
        patterns.add(layer, queries)

    decoder = Decoder(config, tensors, CPU, on_queries=watch)
    with torch.inference_mode():
        run_text(decoder, tokens, sequence)
    for layer, window in enumerate(config.windows):
        queries = torch.cat(seen[layer]).double()
        keys = kv[0, :, layer, 0].transpose(0, 1).flatten(1, 2)[:, : len(tokens)].double()
        total = 0.0
        for at in range(1, len(tokens)):
            first = 0 if window is None else max(0, at - window + 1)
            means = []
            for head in (0, 1):
                scores = queries[at, 2 * head : 2 * head + 2] @ keys[head, first : at + 1].t()
                mean = (scores * DIM**-0.5).softmax(1).mean(0)
                means.append(mean[1:] if first == 0 else mean)
            total += float(torch.nn.functional.cosine_similarity(*means, dim=0))
        expected = total / (len(tokens) - 1)
        assert patterns.result()[layer][0][1] == pytest.approx(expected, abs=1e-5)


def engine_of(path: Path, plan: Path | None) -> Any:
    settings = build(
        {
            "model.path": str(path),
            "model.shared_heads": None if plan is None else str(plan),
            "engine.device": "cpu",
            "engine.threads": 1,
            "memory.limit": "1024 tokens",
        }
    )
    return load_engine(InlinePort(), Start(dump(settings), 1, 258, []))[1]


def test_serving_with_a_plan_takes_less_memory_in_a_namespace_of_its_own(pairs, found, tmp_path):
    path = tmp_path / "heads.json"
    write_plan(found.plan, path)
    assert read_plan(path) == found.plan
    plain, shared = engine_of(pairs, None), engine_of(pairs, path)
    assert plain.model["shared_heads"] is None
    assert (plain.model["kv_heads"], shared.model["kv_heads"]) == (4, 2)
    assert shared.pool["token_bytes"] * 2 == plain.pool["token_bytes"]
    assert shared.pool["page_bytes"] * 2 == plain.pool["page_bytes"]
    assert shared.model["shared_heads"]["kv_heads_before"] == 4
    assert shared.model["fingerprint"] == f"{plain.model['fingerprint']}-{found.plan.digest}"


def test_a_plan_of_another_model_is_refused_with_the_reason(pairs, found, tmp_path):
    path = tmp_path / "heads.json"
    write_plan(found.plan, path)
    small = write_model(tmp_path / "small")
    with pytest.raises(ModelError, match="for pairs, 2 layers of 4 KV heads of 8; this model"):
        engine_of(small, path)
    config, tensors = read_config(resolve(str(pairs))), load_file(pairs / "model.safetensors")
    plain = {key.removeprefix("model."): value + 0.01 for key, value in tensors.items()}
    other = directory_of(tmp_path / "other", config, plain)
    with pytest.raises(ModelError, match="other weights of the same shape, those of pairs"):
        engine_of(other, path)
    with pytest.raises(ModelError, match=r"nowhere\.json cannot be read"):
        engine_of(pairs, tmp_path / "nowhere.json")


def test_the_command_reports_writes_a_plan_and_plan_tells_what_it_saves(pairs, tmp_path):
    run = CliRunner().invoke
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {at * 7919 % 1000} of a text\n" for at in range(40)))
    out = tmp_path / "heads.json"
    words = ["analyse-heads", str(pairs), "--text", str(text), "--device", "cpu"]
    done = run(app, [*words, "--tokens", "128", "--out", str(out), "--format", "json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["chosen"]["kv_heads"] == 2
    assert report["chosen"]["kv_saved_ratio"] == 0.5
    assert abs(report["chosen"]["perplexity_rise_ratio"]) < 1e-3
    assert report["by_layer"][0]["alike"] == [[0, 2], [1, 3]]
    assert report["measured_tokens"] == report["compared_tokens"] == 64
    plan = ["plan", str(pairs), "--memory", "1GB", "--device", "cpu", "--format", "json"]
    before = json.loads(run(app, plan).stdout)["token_bytes"]
    after = json.loads(run(app, [*plan, "--shared-heads", str(out)]).stdout)["token_bytes"]
    assert after * 2 == before
    shown = run(app, [*words, "--tokens", "64"])
    assert "0+2 1+3" in shown.stdout
    none = run(app, [*words, "--tokens", "64", "--heads", "4"])
    assert none.exit_code == 2
    short = run(app, [*words, "--tokens", "1000"])
    assert short.exit_code == 1
    assert "tokens, 1000 are needed" in short.stderr
