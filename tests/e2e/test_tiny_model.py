"""A tiny random model of transformers, served without a tokenizer, against transformers."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Daemon, serving

pytestmark = pytest.mark.slow

VOCABULARY = 512


@lru_cache(maxsize=1)
def reference() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=511,
        bos_token_id=None,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    reference().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """64 pages of 16 tokens, a length limit beyond them."""
    settings = ("memory.page_tokens=16", "memory.limit=1024 tokens", "model.max_len=2048")
    with serving(tmp_path_factory.mktemp("state"), str(model), *settings) as served:
        yield served


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(500), k=length)


def logits(tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(reference()(torch.tensor([tokens])).logits[0])


def assert_greedy(context: list[int], output: list[int]) -> None:
    """Each token is the most likely one, or tied with it within 1e-4."""
    rows = logits(context + output)[len(context) - 1 : -1]
    behind = rows.max(-1).values - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert behind.max().item() < 1e-4


def ids(daemon: Daemon, tokens: list[int], **more: object) -> list[int]:
    answer = daemon.complete(tokens, return_token_ids=True, ignore_eos=True, **more)
    return list(answer["choices"][0]["token_ids"])


def test_greedy_ids(daemon: Daemon) -> None:
    for length in (1, 16, 50, 300):
        output = ids(daemon, prompt(length), max_tokens=60)
        assert len(output) == 60
        assert_greedy(prompt(length), output)


def test_two_that_cannot_both_fit(daemon: Daemon) -> None:
    """Case C014."""
    preempted = daemon.metric("memd_preemptions_total")
    with ThreadPoolExecutor(2) as threads:
        outputs = list(
            threads.map(lambda seed: ids(daemon, prompt(500, seed), max_tokens=300), (1, 2))
        )
    for seed, output in zip((1, 2), outputs, strict=True):
        assert len(output) == 300
        assert_greedy(prompt(500, seed), output)
    assert daemon.metric("memd_preemptions_total") >= preempted + 1
    daemon.assert_idle()


def test_a_seeded_request_survives_preemptions(daemon: Daemon) -> None:
    """Case C018."""
    options = {"seed": 7, "temperature": 1, "frequency_penalty": 1, "max_tokens": 600}
    alone = ids(daemon, prompt(20), **options)
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(ids, daemon, prompt(20), **options)
        hits = 0
        while not again.done():
            for row in daemon.http.get("/admin/v1/requests").json()["requests"]:
                path = f"/admin/v1/requests/{row['id']}/preempt"
                hits += daemon.post(path, {}).status_code == 200
            time.sleep(0.05)
    assert hits >= 1
    assert again.result() == alone
    assert len(alone) == 600


def test_edges_of_the_sampling_parameters(daemon: Daemon) -> None:
    """Case C074."""
    base = {"seed": 1, "temperature": 1, "max_tokens": 20}
    unset = ids(daemon, prompt(9), **base)
    greedy = ids(daemon, prompt(9), max_tokens=20)
    assert unset != greedy
    for field, value in (("top_p", 0), ("top_p", 1e-9), ("top_k", 1)):
        assert ids(daemon, prompt(9), **base, **{field: value}) == greedy
    for field, value in (("top_p", 1), ("top_k", 0), ("top_k", -1), ("top_k", VOCABULARY + 1)):
        assert ids(daemon, prompt(9), **base, **{field: value}) == unset
    for field, value in (("top_p", 1.0000001), ("top_p", -0.1), ("top_k", -2)):
        body = {"model": "tiny", "prompt": prompt(9), field: value}
        response = daemon.post("/v1/completions", body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1, 1.5, "7", True])
def test_seeds_that_are_none(daemon: Daemon, seed: object) -> None:
    """Case C076."""
    body = {"model": "tiny", "prompt": prompt(3), "seed": seed}
    response = daemon.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "seed"


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds_at_the_edges_repeat(daemon: Daemon, seed: int) -> None:
    options = {"seed": seed, "temperature": 1, "max_tokens": 10}
    assert ids(daemon, prompt(3), **options) == ids(daemon, prompt(3), **options)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_usage_counts_every_token_once(daemon: Daemon, n: int, max_tokens: int) -> None:
    """Case C080."""
    answer = daemon.complete(prompt(12), n=n, max_tokens=max_tokens, ignore_eos=True, temperature=1)
    usage = answer["usage"]
    assert usage["completion_tokens"] == n * max_tokens
    assert usage["prompt_tokens"] == 12
    assert usage["total_tokens"] == 12 + n * max_tokens


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored(daemon: Daemon, max_tokens: int) -> None:
    """Case C082."""
    answer = daemon.complete(
        prompt(12, 3), echo=True, logprobs=1, max_tokens=max_tokens, return_token_ids=True
    )
    told = answer["choices"][0]["logprobs"]
    tokens = prompt(12, 3) + answer["choices"][0]["token_ids"]
    assert len(told["token_logprobs"]) == 12 + max_tokens == len(tokens)
    assert told["token_logprobs"][0] is None
    expected = logits(tokens).log_softmax(-1)
    for position in range(1, len(tokens)):
        wanted = expected[position - 1, tokens[position]].item()
        assert told["token_logprobs"][position] == pytest.approx(wanted, abs=1e-3)


def test_the_length_told_is_the_length_served(daemon: Daemon) -> None:
    """Case C085."""
    limit = daemon.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert limit == 1024
    for length, status in ((limit - 1, 200), (limit, 400), (limit + 1, 400)):
        body = {"model": "tiny", "prompt": prompt(length), "max_tokens": 1}
        response = daemon.post("/v1/completions", body)
        assert response.status_code == status
        if status == 400:
            message = response.json()["error"]["message"]
            assert f"maximum context length is {limit} tokens" in message
            assert str(length) in message
    daemon.complete(prompt(10), max_tokens=5)
    daemon.assert_idle()


def test_a_pool_far_too_small_finishes_everybody(model: Path, tmp_path: Path) -> None:
    """Case C016."""
    settings = ("memory.page_tokens=16", "memory.limit=128 tokens")
    with serving(tmp_path, str(model), *settings) as daemon:
        alone = ids(daemon, prompt(60, 0), max_tokens=60)
        with ThreadPoolExecutor(20) as threads:
            outputs = list(
                threads.map(lambda seed: ids(daemon, prompt(60, seed), max_tokens=60), range(20))
            )
        assert outputs[0] == alone
        for seed, output in enumerate(outputs):
            assert len(output) == 60
            assert_greedy(prompt(60, seed), output)
        assert daemon.metric("memd_preemptions_total") <= 3 * 21
        daemon.assert_idle()
    assert len((tmp_path / "log").read_text().splitlines()) < 20


def test_greedy_ids_do_not_depend_on_company(daemon: Daemon) -> None:
    """Case C072, float32: 20 prompts alone, then all together."""
    alone = [ids(daemon, prompt(30 + seed, seed), max_tokens=64) for seed in range(20)]
    daemon.post("/admin/v1/pool/flush", {})
    with ThreadPoolExecutor(20) as threads:
        together = list(
            threads.map(lambda seed: ids(daemon, prompt(30 + seed, seed), max_tokens=64), range(20))
        )
    for seed in range(20):
        if alone[seed] != together[seed]:  # a tie may fall either way
            assert_greedy(prompt(30 + seed, seed), together[seed])


def test_logits_that_are_no_numbers_end_their_request(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Weights that overflow float16 give an error, not a text of token 0 (case C070)."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("overflow") / "tiny"
    directory.mkdir()
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e6
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text((model / "config.json").read_text())
    state = tmp_path_factory.mktemp("state")
    with serving(state, str(directory), "model.dtype=float16", "memory.page_tokens=16") as broken:
        body = {"model": "tiny", "prompt": prompt(40), "max_tokens": 8}
        response = broken.post("/v1/completions", body)
        assert response.status_code >= 500
        assert response.json()["error"]["code"] == "numerical_error"
        streamed = broken.post("/v1/completions", {**body, "stream": True})
        assert streamed.status_code >= 500
        assert streamed.json()["error"]["code"] == "numerical_error"
        assert broken.metric("memd_nan_logits_total") >= 2
        assert broken.metric("memd_finished_sequences_total", reason="error") == 2
        assert broken.metric("memd_pool_pages", state="cached") == 0
        status = broken.http.get("/admin/v1/status").json()
        assert status["model"]["dtype"] == "float16"
        assert status["state"] == "ready"
