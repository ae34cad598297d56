"""Health, states of the daemon, and metrics as Prometheus sees them."""

import contextlib
import random
import shutil
import subprocess
import threading
import time
from collections import Counter

import httpx2
import pytest
from http_stand import Stand, engine_snapshot, say
from prometheus_client.parser import text_string_to_metric_families

from memd.engine.messages import Loading, StepReport


def samples(stand: Stand) -> dict[tuple[str, tuple], float]:
    families = text_string_to_metric_families(stand.http.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(stand: Stand, name: str, **labels: str) -> float:
    return samples(stand)[name, tuple(sorted(labels.items()))]


def test_ready(stand: Stand):
    for path in ("/health", "/health/ready", "/health/live"):
        assert stand.http.get(path).json() == {"status": "ok"}
    assert stand.http.get("/version").json()["name"] == "memd"


def test_a_failure_is_told_with_its_reason(make_stand):
    stand = make_stand()
    stand.on_loop(lambda: stand.client.fail("the engine died 5 times in a row"))
    for path in ("/health", "/health/live", "/health/ready"):
        assert stand.wait_for(lambda path=path: stand.http.get(path).status_code == 503)
        reason = "the engine died 5 times in a row"
        assert stand.http.get(path).json() == {"status": "failed", "reason": reason}


def test_loading_then_ready(make_stand):
    stand = make_stand(loaded=False)
    assert stand.wait_for(lambda: stand.client.loading == ("weights", 0.25))
    for path in ("/health", "/health/ready"):
        response = stand.http.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "loading", "stage": "weights", "progress": 0.25}
    assert stand.http.get("/health/live").status_code == 200
    for response in (stand.complete(), stand.chat(), stand.http.get("/v1/models")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "loading"
        assert int(response.headers["retry-after"]) > 0
        assert response.headers["x-should-retry"] == "true"
    status = stand.http.get("/admin/v1/status").json()
    assert (status["state"], status["stage"]) == ("loading", "weights")
    assert status["max_model_len"] is None
    assert status["engine"]["pid"] is None
    stand.engine.outbox += [Loading("warm-up", 1.0), stand.ready]
    assert stand.wait_for(lambda: stand.http.get("/health").status_code == 200)
    assert stand.complete().status_code == 200


def test_draining_lets_running_requests_finish(make_stand):
    stand = make_stand()
    stand.engine.script = say("Hello!", pause=0.05)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(stand.complete()))
    thread.start()
    assert stand.wait_for(lambda: stand.client.open)
    stand.on_loop(stand.client.drain)
    assert stand.http.get("/health/ready").json() == {"status": "draining"}
    assert stand.http.get("/health/live").status_code == 200
    refused = stand.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert stand.http.get("/metrics").status_code == 200
    assert stand.http.get("/admin/v1/status").json()["state"] == "draining"
    thread.join(60)
    assert answers[0].json()["choices"][0]["text"] == "Hello!"
    assert stand.client.idle.is_set()


def test_health_answers_while_a_huge_prompt_is_tokenised(make_stand):
    stand = make_stand(max_model_len=8_000_000)
    huge = "the words go on " * 60_000
    thread = threading.Thread(target=lambda: stand.http.post("/tokenize", json={"prompt": huge}))
    thread.start()
    waits = []
    while thread.is_alive() or not waits:
        started = time.monotonic()
        assert stand.http.get("/health/live").status_code == 200
        waits.append(time.monotonic() - started)
        time.sleep(0.02)
    assert max(waits) < 1.0


def test_requests_are_counted_by_outcome(make_stand):
    stand = make_stand()
    stand.complete(max_tokens=4)
    stand.complete(temperature=9)
    stand.chat(stream=True)

    def count(endpoint: str, outcome: str) -> float:
        return value(stand, "memd_requests_total", model="tiny", endpoint=endpoint, outcome=outcome)

    assert stand.wait_for(lambda: count("chat_completions", "ok") == 1)
    assert count("completions", "ok") == 1
    assert count("completions", "invalid") == 1
    for name, number in (
        ("memd_time_to_first_token_seconds_count", 2),
        ("memd_inter_token_latency_seconds_count", 3 + 6),
        ("memd_time_per_output_token_seconds_count", 2),
        ("memd_request_prompt_tokens_count", 2),
        ("memd_request_generated_tokens_sum", 4 + 7),
    ):
        assert value(stand, name, model="tiny") == number


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_is_counted_as_such(make_stand, stream: bool):
    stand = make_stand()
    stand.engine.script = say("x" * 100, "length", pause=0.05)
    body = {"model": "tiny", "prompt": "hi", "stream": stream, "max_tokens": 100}
    with (
        contextlib.suppress(httpx2.ReadTimeout),
        stand.http.stream("POST", "/v1/completions", json=body, timeout=0.2) as response,
    ):
        next(response.iter_raw())
    labels = {"model": "tiny", "endpoint": "completions", "outcome": "cancelled"}
    assert stand.wait_for(lambda: value(stand, "memd_requests_total", **labels) == 1)


def test_everything_exists_at_the_first_scrape(make_stand):
    stand = make_stand(loaded=False)
    stand.client.snapshot = None
    found = samples(stand)
    names = {name for name, _ in found}
    assert not [name for name in names if name.endswith("_created")]
    for name in (
        "memd_requests_total",
        "memd_evicted_pages_total",
        "memd_prefix_hit_tokens_total",
        "memd_preemptions_total",
        "memd_engine_step_seconds_bucket",
        "memd_setting_changes_total",
    ):
        assert name in names
    counted = {
        n: v for (n, _), v in found.items() if n.startswith("memd_") and n.endswith("_total")
    }
    assert not any(counted.values())
    tiers = {dict(labels)["tier"] for name, labels in found if name.endswith("hit_tokens_total")}
    assert tiers == {"device", "host", "disk"}
    # What is not known is absent.
    assert not names & {"memd_pool_pages", "memd_pool_occupied_ratio", "memd_requests_running"}
    assert value(stand, "memd_state", state="loading") == 1


def test_the_pool_adds_up(stand: Stand):
    found = samples(stand)
    pages = sum(v for (name, _), v in found.items() if name == "memd_pool_pages")
    assert pages == value(stand, "memd_pool_capacity_pages", gpu="0") == 64
    assert value(stand, "memd_pool_occupied_ratio", gpu="0") == 50 / 64
    assert value(stand, "memd_pool_active_ratio", gpu="0") == 10 / 64
    blocks = {"committed": 3, "uncommitted": 1}
    for state, count in blocks.items():
        assert value(stand, "memd_pool_blocks", gpu="0", state=state) == count
    assert ("memd_leaked_pages", (("gpu", "0"),)) not in found  # no audit has run


def test_gauges_return_to_zero(stand: Stand):
    stand.engine.outbox.append(StepReport(snapshot=engine_snapshot(running=0, active_pages=0)))
    assert stand.wait_for(lambda: value(stand, "memd_pool_active_ratio", gpu="0") == 0)
    assert value(stand, "memd_requests_running", model="tiny") == 0


def test_clients_cannot_add_series(stand: Stand):
    stand.complete(model="first")
    before = len(samples(stand))
    chance = random.Random(1)
    for _ in range(100):
        stand.complete(model=f"m{chance.random()}", user=f"u{chance.random()}")
        stand.http.get(f"/p{chance.random()}")
        stand.http.get(f"/v1/models/m{chance.random()}")
    assert len(samples(stand)) == before


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing(stand: Stand):
    stand.complete()
    text = stand.http.get("/metrics").text
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_openmetrics_on_request(stand: Stand):
    response = stand.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_three_daemons_in_one_process(make_stand, tmp_path):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        stand = make_stand(directory=tmp_path / str(number))
        families = text_string_to_metric_families(stand.http.get("/metrics").text)
        assert max(Counter(family.name for family in families).values()) == 1
