"""The engine is killed, hangs or cannot live, and the daemon's clients see a pause at most.

`MEMD_KILLS=100 pytest tests/e2e/test_engine_death.py -k kills_in_a_row` kills it more often.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kills import (
    Stream,
    alive,
    engine_pid,
    engine_process,
    kill_engine,
    run_streams,
    wait_for_engine,
)
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("MEMD_KILLS", "6"))
SETTINGS = ("engine.device=cpu", "memory.limit=16384 tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=4)


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("state"), str(model), *SETTINGS) as served:
        yield served


def body(index: int, max_tokens: int, **more: object) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"The stream of number {index} ",
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
        "seed": index,
        "temperature": 0 if index % 2 else 1,
        **more,
    }


def eight_bodies(max_tokens: int = 400) -> list[dict[str, Any]]:
    """Greedy and seeded; some with logprobs, penalties, or stop strings, one of them never seen."""
    extras: list[dict[str, object]] = [
        {},
        {"logprobs": 3},
        {"logprobs": 0, "frequency_penalty": 0.5},
        {"stop": ["never to be seen"]},
        {"top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.1, "echo": True, "logprobs": 1},
        {"presence_penalty": 0.3},
        {"temperature": 1.5},
    ]
    return [body(index, max_tokens, **more) for index, more in enumerate(extras)]


def undisturbed(daemon: Daemon, bodies: list[dict[str, Any]]) -> list[Stream]:
    """The streams of a daemon that nobody hurts."""
    streams, threads = run_streams(daemon.url, bodies)
    for thread in threads:
        thread.join(120)
    assert [stream.error for stream in streams] == [None] * len(bodies)
    return streams


def stop_late(body: dict[str, Any], text: str) -> None:
    """Give a body a stop string that its text has near its end and not before."""
    late = [text[at : at + 3] for at in range(len(text) * 3 // 4, len(text) - 3)]
    body["stop"] = [next(each for each in late if each.isascii() and text.count(each) == 1)]


def assert_same(streams: list[Stream], expected: list[Stream]) -> None:
    for stream, wanted in zip(streams, expected, strict=True):
        assert stream.error is None
        assert stream.token_ids == wanted.token_ids
        assert stream.text == wanted.text
        assert stream.finish_reason == wanted.finish_reason
        assert stream.usage["completion_tokens"] == wanted.usage["completion_tokens"]
        assert stream.usage["prompt_tokens"] == wanted.usage["prompt_tokens"]
        # Recomputed KV may differ from the first in the last bits.
        assert stream.logprobs == pytest.approx(wanted.logprobs, abs=1e-4, nan_ok=True)


@pytest.mark.timeout(180 + 12 * KILLS)
def test_kills_in_a_row_fail_no_stream(daemon: Daemon) -> None:
    bodies = eight_bodies(max_tokens=max(400, 12 * KILLS))
    stop_late(bodies[-1], undisturbed(daemon, bodies[-1:])[0].text)
    expected = undisturbed(daemon, bodies)
    assert expected[-1].finish_reason == "stop"
    restarts = daemon.metric("memd_engine_restarts_total", reason="killed")

    streams, threads = run_streams(daemon.url, bodies)
    for kill in range(KILLS):
        had = [len(stream.token_ids) for stream in streams]
        daemon.wait_until(
            lambda had=had: (
                sum(len(s.token_ids) for s in streams) >= sum(had) + 16
                or not any(thread.is_alive() for thread in threads)
            ),
            60,
            f"more tokens after {kill} kills",
        )
        pid = kill_engine(daemon)
        wait_for_engine(daemon, other_than=pid)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()

    assert_same(streams, expected)
    assert daemon.metric("memd_engine_restarts_total", reason="killed") == restarts + KILLS
    daemon.assert_idle()


def test_kills_as_soon_as_it_serves_again_fail_no_stream(daemon: Daemon) -> None:
    """No time for a token in between: every sequence is a suspect, and is cleared."""
    bodies = eight_bodies(max_tokens=100)
    expected = undisturbed(daemon, bodies)
    streams, threads = run_streams(daemon.url, bodies)
    daemon.wait_until(lambda: all(stream.token_ids for stream in streams), 60, "first tokens")
    pid = 0
    for _ in range(4):
        wait_for_engine(daemon, other_than=pid)
        pid = kill_engine(daemon)
    for thread in threads:
        thread.join(120)
    assert_same(streams, expected)


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_an_engine_killed_while_it_loads_is_replaced_at_once(
    daemon: Daemon, seconds: float
) -> None:
    restarts = daemon.metric("memd_engine_restarts_total", reason="killed")
    served = kill_engine(daemon)
    daemon.wait_until(lambda: engine_process(daemon) not in (None, served), 60, "the next one")
    time.sleep(seconds)
    loading = engine_process(daemon)
    assert loading is not None
    assert engine_pid(daemon) is None
    os.kill(loading, signal.SIGKILL)
    wait_for_engine(daemon, other_than=loading, seconds=30)
    assert daemon.metric("memd_engine_restarts_total", reason="killed") == restarts + 2
    daemon.complete("hi", max_tokens=4)


def test_a_step_that_takes_longer_than_a_hang_is_none(tmp_path: Path) -> None:
    """Its layers are progress."""
    deep = write_model(tmp_path / "tiny", num_layers=240)
    settings = ("engine.hang_timeout=3s", "engine.max_batch_tokens=4096")
    with serving(tmp_path, str(deep), *SETTINGS, *settings) as daemon:
        daemon.complete([1 + index % 200 for index in range(4000)], max_tokens=1)
        if daemon.metric("memd_engine_step_seconds_sum") < 3.5:
            pytest.skip("this machine is too fast for the test")
        assert daemon.metric("memd_engine_restarts_total") == 0


def test_readiness_follows_and_live_settings_survive(daemon: Daemon) -> None:
    assert daemon.settings(memory__watermark__high="83%").status_code == 200
    before = daemon.http.get("/admin/v1/status").json()["engine"]
    stream, threads = run_streams(daemon.url, [body(1, 200)])
    daemon.wait_until(lambda: stream[0].token_ids, 60, "a token")
    pid = kill_engine(daemon)
    daemon.wait_until(lambda: engine_pid(daemon) is None, 60, "the death is noticed")

    ready = daemon.http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "restarting")
    assert ready.headers["retry-after"] == "1"
    assert daemon.http.get("/health/live").status_code == 200
    assert daemon.http.get("/admin/v1/status").json()["state"] == "restarting"
    assert daemon.metric("memd_state", state="restarting") == 1
    for response in (
        daemon.post("/v1/completions", {**body(2, 5), "stream": False}),
        daemon.post("/admin/v1/pool/flush", {}),
        daemon.settings(memory__watermark__high="84%"),
    ):
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "restarting"
        assert response.headers["retry-after"] == "1"

    wait_for_engine(daemon, other_than=pid)
    threads[0].join(60)
    assert len(stream[0].token_ids) == 200
    assert daemon.http.get("/health/ready").status_code == 200
    status = daemon.http.get("/admin/v1/status").json()
    assert status["pool"]["watermark"]["high"] == 0.83
    assert status["engine"]["restarts"] == before["restarts"] + 1
    assert not alive(before["pid"])
    daemon.assert_idle()


def test_pings_go_on_while_nothing_comes(daemon: Daemon) -> None:
    streams, threads = run_streams(daemon.url, [body(1, 1000)])  # not over at once
    daemon.wait_until(lambda: streams[0].token_ids, 60, "a token")
    os.kill(wait_for_engine(daemon), signal.SIGSTOP)
    daemon.wait_until(lambda: streams[0].pings > 0, 60, "a ping")
    kill_engine(daemon)
    threads[0].join(60)
    assert len(streams[0].token_ids) == 1000


def test_a_stopped_engine_is_noticed_busy_or_idle(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *SETTINGS, "engine.hang_timeout=2s") as daemon:
        assert daemon.metric("memd_engine_restarts_total", reason="hung") == 0
        expected = undisturbed(daemon, [body(3, 600)])
        streams, threads = run_streams(daemon.url, [body(3, 600)])
        daemon.wait_until(lambda: len(streams[0].token_ids) > 5, 60, "tokens")
        for _ in ("busy", "idle"):
            pid = kill_engine(daemon, signal.SIGSTOP)
            stopped_at = time.monotonic()
            daemon.wait_until(lambda pid=pid: not alive(pid), 60, "the hang is noticed")
            assert time.monotonic() - stopped_at > 1.8
            wait_for_engine(daemon, other_than=pid)
            threads[0].join(60)
        assert_same(streams, expected)
        assert daemon.metric("memd_engine_restarts_total", reason="hung") >= 2
        assert "made no progress" in (tmp_path / "log").read_text()


def test_a_crash_loop_ends_in_failed(model: Path, tmp_path: Path) -> None:
    away = model.with_name("away")
    with serving(tmp_path, str(model), *SETTINGS, exit_code=1) as daemon:
        streams, threads = run_streams(daemon.url, [body(1, 4000)])
        daemon.wait_until(lambda: streams[0].token_ids, 60, "a token")
        weights = model / "model.safetensors"
        weights.rename(away)
        try:
            kill_engine(daemon)
            threads[0].join(60)
        finally:
            away.rename(weights)
        assert "engine_failed" in str(streams[0].error)
        for path in ("/health/live", "/health/ready", "/health"):
            response = daemon.http.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == "failed"
            assert "died 5 times in a row" in response.json()["reason"]
        status = daemon.http.get("/admin/v1/status").json()
        assert status["state"] == "failed"
        assert "died 5 times in a row" in status["failure"]
        assert "safetensors" in status["failure"]
        assert status["engine"] == {"pid": None, "restarts": 4}


def test_killing_the_daemon_leaves_no_engine(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *SETTINGS, exit_code=-signal.SIGKILL) as daemon:
        pid = wait_for_engine(daemon)
        os.kill(pid, signal.SIGSTOP)
        daemon.process.kill()
        daemon.process.wait(60)
        daemon.wait_until(lambda: not alive(pid), 60, "the engine is gone")


def test_sigterm_lets_sixteen_streams_finish(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *SETTINGS) as daemon:
        streams, threads = run_streams(daemon.url, [body(index, 300) for index in range(16)])
        daemon.wait_until(lambda: all(stream.token_ids for stream in streams), 60, "first tokens")
        daemon.process.send_signal(signal.SIGTERM)
        # The engine's death is no reason not to finish them.
        pid = kill_engine(daemon)
        ready = daemon.http.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        for thread in threads:
            thread.join(120)
        assert [len(stream.token_ids) for stream in streams] == [300] * 16
        assert [stream.error for stream in streams] == [None] * 16
        assert daemon.process.wait(60) == 0
        assert not alive(pid)


def test_a_second_sigterm_ends_sixteen_streams_at_once(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *SETTINGS) as daemon:
        pid = wait_for_engine(daemon)
        bodies = [body(index, 3000) for index in range(16)]
        streams, threads = run_streams(daemon.url, bodies)
        daemon.wait_until(lambda: all(stream.token_ids for stream in streams), 60, "first tokens")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_until(
            lambda: daemon.http.get("/health/ready").status_code == 503, 60, "draining"
        )
        daemon.process.send_signal(signal.SIGTERM)
        asked_at = time.monotonic()
        assert daemon.process.wait(60) == 0
        assert time.monotonic() - asked_at < 6
        assert not alive(pid)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
