"""A daemon that serves the demo model over int8 pages."""

import random

import demo
import pytest
from served import serving

pytestmark = [demo.needs_demo_model, pytest.mark.slow]

SETTINGS = (
    "kv.format=int8",
    "kv.full_precision_tokens=64",
    "kv.recent_tokens=64",
    "memory.limit=2048 tokens",
    "model.dtype=float32",
)


def test_a_chat_over_int8_pages(tmp_path_factory: pytest.TempPathFactory) -> None:
    prompt = random.Random(3).choices(range(100, 49_000), k=400)
    with serving(tmp_path_factory.mktemp("packed"), demo.NAME, *SETTINGS) as daemon:
        status = daemon.http.get("/admin/v1/status").json()
        assert status["packing"]["format"] == "int8"
        assert 0 < status["packing"]["load_error"] < status["packing"]["most_error"] == 0.02
        texts = []
        for cached in (0, 384):  # the last page is not full
            answer = daemon.complete(prompt, max_tokens=8, return_token_ids=True)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached
            texts.append(answer["choices"][0]["token_ids"])
        assert texts[0] == texts[1]
        question = {"role": "user", "content": "What is the capital of France?"}
        chat = {"model": "smollm2-135m", "messages": [question], "temperature": 0}
        answer = daemon.post("/v1/chat/completions", {**chat, "max_tokens": 12}).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        status = daemon.http.get("/admin/v1/status").json()
        packing = status["packing"]
        assert packing["pages"] >= 4
        assert packing["due_pages"]["packed"] >= 4
        assert packing["due_pages"]["failed"] == 0
        assert packing["saved_bytes"] > 0
        assert 1 < packing["compression_ratio"] < 4
        assert 0 < packing["mean_error"] <= packing["worst_error"] < 0.05
        assert packing["stopped"] is None
        daemon.assert_idle()
        assert daemon.metric("memd_pool_packed_pages") == packing["pages"]
        assert daemon.metric("memd_packing_error_ratio", kind="mean") == packing["mean_error"]
        columns = daemon.http.get("/admin/v1/pool/blocks").json()["columns"]
        assert sum(columns["packed"]) >= 1
