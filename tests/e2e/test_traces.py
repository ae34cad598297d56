"""A recording of a real daemon whose engine dies: each sequence is in it once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kills import Stream, kill_engine, run_streams, wait_for_engine
from served import serving
from tiny import write_model

from memd.simulate.trace import read_trace, whole_pages

pytestmark = pytest.mark.slow

SETTINGS = ("engine.threads=1", "engine.device=cpu", "memory.limit=16384 tokens")


def memd(url: str, *words: str) -> str:
    command = [sys.executable, "-m", "memd.cli", "trace", *words, "--url", url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def body(index: int, max_tokens: int) -> dict[str, Any]:
    prompt = f"A beginning that all of them have, a few pages long. Stream {index}"
    more = {"stream": True, "ignore_eos": True, "seed": index, "return_token_ids": True}
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, **more}


def test_cached_preempted_aborted_and_resubmitted_sequences_are_recorded_once(tmp_path: Path):
    model = write_model(tmp_path / "tiny", num_layers=4)
    (tmp_path / "state").mkdir()
    with serving(tmp_path / "state", str(model), *SETTINGS) as daemon:
        memd(daemon.url, "start", "--reason", "test")
        leaves = Stream(leaves_after=20)
        leaves.read(daemon.url, body(2, 300))
        (first, second), threads = run_streams(daemon.url, [body(at, 300) for at in range(2)])
        daemon.wait_until(lambda: first.token_ids and second.token_ids, 60, "tokens")
        daemon.http.post(f"/admin/v1/requests/{first.id}/preempt")
        kill_engine(daemon)
        for thread in threads:
            thread.join(120)
        assert len(first.token_ids) == len(second.token_ids) == 300
        wait_for_engine(daemon)
        daemon.complete(body(0, 1)["prompt"], max_tokens=1)
        memd(daemon.url, "stop")
        path = tmp_path / "trace.jsonl"
        memd(daemon.url, "export", "--output", str(path))
        header, requests = read_trace(path)
        found = list(requests)
        assert len(found) == len({each.request for each in found}) == 4
        assert sorted(each.outcome for each in found) == ["abort", "length", "length", "length"]
        assert [each.output_tokens for each in found].count(300) == 2
        page_tokens = header.pool.page_tokens
        for each in found:
            count = whole_pages(each.prompt_tokens, each.output_tokens, page_tokens)
            assert len(set(each.pages)) == count
        last = found[-1]
        assert last.cached_tokens
        assert all(each.pages[0] == last.pages[0] for each in found)
        summary = json.loads(memd(daemon.url, "show", str(path), "--format", "json"))
        assert summary["requests"] == 4
        assert summary["outcomes"] == {"abort": 1, "length": 3}
        assert summary["infinite_cache_hit_share"] > 0.5
        assert daemon.metric("memd_trace_requests_total", outcome="recorded") == 4
