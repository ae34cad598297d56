"""Faults on demand in a real daemon: each hits its own request, all others get their text."""

from pathlib import Path
from typing import Any

import pytest
from kills import Stream, run_streams
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

SETTINGS = ("memory.limit=16384 tokens",)
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=4)


def bodies() -> list[dict[str, Any]]:
    return [
        {
            "model": "tiny",
            "prompt": f"The stream of number {index} ",
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": True,
            "seed": index,
        }
        for index in range(6)
    ]


def arm(daemon: Daemon, **plan: object) -> None:
    response = daemon.http.put("/admin/v1/debug/faults", json=plan)
    assert response.status_code == 200, response.text


def finish(threads: list[Any]) -> None:
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def assert_right(streams: list[Stream], expected: list[Stream]) -> None:
    for stream, wanted in zip(streams, expected, strict=True):
        assert stream.error is None
        assert stream.text == wanted.text
        assert stream.token_ids == wanted.token_ids
        assert stream.usage["prompt_tokens"] == wanted.usage["prompt_tokens"]
        assert stream.usage["completion_tokens"] == MAX_TOKENS


def test_requests_told_to_fail_fail_alone(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *SETTINGS, "debug.faults=true") as daemon:
        expected, threads = run_streams(daemon.url, bodies())
        finish(threads)
        assert daemon.http.get("/admin/v1/status").json()["faults"] == {}

        streams, threads = run_streams(daemon.url, bodies())
        daemon.wait_until(lambda: all(stream.id for stream in streams), 60, "first tokens")
        victims = {streams[0].id: "nan", streams[1].id: "error"}
        arm(daemon, requests=victims)
        finish(threads)
        assert "numerical_error" in str(streams[0].error)
        assert "model_error" in str(streams[1].error)
        assert_right(streams[2:], expected[2:])
        assert daemon.metric("memd_engine_restarts_total") == 0
        assert daemon.metric("memd_pool_pages", state="quarantined") > 0

        answer = daemon.http.get("/admin/v1/debug/faults").json()
        assert answer["armed"] == {"requests": victims}
        assert answer["injected"]["nan"] == 1
        daemon.assert_idle()
        assert daemon.metric("memd_pool_pages", state="quarantined") == 0


def test_a_request_that_kills_every_engine_fails_alone(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *SETTINGS, "debug.faults=true") as daemon:
        expected, threads = run_streams(daemon.url, bodies())
        finish(threads)

        streams, threads = run_streams(daemon.url, bodies())
        daemon.wait_until(lambda: all(stream.id for stream in streams), 60, "first tokens")
        arm(daemon, requests={streams[3].id: "kill"})
        finish(threads)
        killer = streams.pop(3)
        assert "engine_failed" in str(killer.error)
        assert killer.token_ids == expected.pop(3).token_ids[: len(killer.token_ids)]
        assert_right(streams, expected)
        # Counted once: what an engine was handed by the one before is no new prompt.
        assert daemon.metric("memd_prompt_tokens_total") == 0
        assert daemon.metric("memd_engine_restarts_total", reason="killed") == 3
        arm(daemon)
        daemon.assert_idle()
        daemon.complete("and on it goes", max_tokens=4)


def scatter(daemon: Daemon) -> None:
    """Leave blocks with a few cached pages each."""
    for index in range(24):
        daemon.complete(
            f"{index} is a prompt that nobody else has, and {'long ' * 60}", max_tokens=1
        )
    listed = daemon.http.get("/admin/v1/prefixes?limit=1000&sort=start").json()["prefixes"]
    body = {"reason": "room here and there"}
    for index, prefix in enumerate(listed):
        if index % 3:
            daemon.post(f"/admin/v1/prefixes/{prefix['id']}/evict", body)


def test_an_engine_killed_in_the_middle_of_a_move_is_not_noticed(
    model: Path, tmp_path: Path
) -> None:
    more = ("debug.faults=true", "memory.block_size=64KiB", "memory.defrag.every_requests=0")
    more += ("memory.defrag.max_fragmentation=100%",)
    with serving(tmp_path, str(model), *SETTINGS, *more) as daemon:
        expected, threads = run_streams(daemon.url, bodies())
        finish(threads)

        scatter(daemon)
        assert daemon.metric("memd_pool_fragmentation_ratio") > 0
        streams, threads = run_streams(daemon.url, bodies())
        daemon.wait_until(lambda: all(stream.id for stream in streams), 60, "first tokens")
        arm(daemon, moves="kill")
        assert daemon.post("/admin/v1/pool/defrag", {}).status_code in (200, 503)
        finish(threads)
        assert_right(streams, expected)
        assert daemon.metric("memd_engine_restarts_total", reason="killed") == 1

        arm(daemon)
        scatter(daemon)
        answer = daemon.post("/admin/v1/pool/defrag", {}).json()
        assert answer["running"]

        def pool() -> dict[str, Any]:
            return dict(daemon.http.get("/admin/v1/pool").json())

        daemon.wait_until(lambda: not pool()["defrag_running"], 60, "the end of the run")
        assert pool()["defrag_last_run"]["moved_pages"] > 0
        assert pool()["fragmentation_ratio"] == 0
        status = daemon.http.get("/admin/v1/status").json()["pool"]
        assert (status["elastic"], status["limit_waits_for"]) == (True, None)
        daemon.assert_idle()
