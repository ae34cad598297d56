"""A daemon that serves the demo model over int8 pages."""

import os
import random
import signal
from pathlib import Path

import demo
import pytest
from served import Daemon, serving

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


def test_a_text_used_twice_goes_on_from_disk_after_kill_9(tmp_path: Path) -> None:
    directory, prompt = tmp_path / "cache", demo.long_text()[:1600]
    on_disk = (f"memory.disk.path={directory}", "memory.disk.expensive_tokens=100000")
    lives = [tmp_path / name for name in ("first", "second")]
    for life in lives:
        life.mkdir()

    def answer(daemon: Daemon) -> tuple[list[int], dict[str, int]]:
        done = daemon.complete(prompt, max_tokens=24, return_token_ids=True, ignore_eos=True)
        return done["choices"][0]["token_ids"], done["usage"]["memd"]["cached_tokens_by_tier"]

    with serving(lives[0], demo.NAME, *SETTINGS, *on_disk, exit_code=-signal.SIGKILL) as daemon:
        assert answer(daemon)[1] == {"device": 0, "host": 0, "disk": 0}
        assert daemon.metric("memd_disk_pages") == 0, "used once, and not expensive"
        undisturbed, tiers = answer(daemon)
        assert tiers["device"] > 256
        pages = tiers["device"] // 64
        daemon.wait_until(
            lambda: daemon.metric("memd_transfers_total", path="h2f") == pages, 60, "is written"
        )
        packed = daemon.metric("memd_pool_packed_pages")
        os.kill(daemon.process.pid, signal.SIGKILL)
    names = [path.read_bytes()[24:40].rstrip(b"\0") for path in directory.glob("?/*.kv")]
    assert (names.count(b"int8-64"), len(names)) == (packed, pages)
    assert packed >= pages / 2
    with serving(lives[1], demo.NAME, *SETTINGS, *on_disk) as daemon:
        tokens, tiers = answer(daemon)
        assert tiers == {"device": 0, "host": 0, "disk": 64 * pages}
        assert tokens == undisturbed
        assert daemon.metric("memd_pool_packed_pages") == packed
        assert daemon.metric("memd_disk_pages") == pages
        daemon.assert_idle()
