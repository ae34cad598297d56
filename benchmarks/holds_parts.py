"""The parts of `holds.py`: each puts a daemon under load and tells what was kept."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import serve
from holds_stand import Stand
from soak_checks import await_idle
from streams import Answer

STREAMS = 8
KILLS = 3
GENERATED = "memd_generated_tokens_total"
MAPPED = "memd_pool_mapped_bytes"
Found = tuple[dict[str, Any], list[str]]


def differing(answers: list[Answer], expected: list[Answer]) -> list[str]:
    """What is wrong with each answer that failed or has another text."""
    wrong = []
    for index, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        if answer.failure or right.failure:
            wrong.append(f"request {index}: {answer.failure}, undisturbed {right.failure}")
        elif answer.text != right.text:
            pairs = enumerate(zip(answer.text.split(), right.text.split(), strict=False))
            at = next((at for at, (one, other) in pairs if one != other), -1)
            wrong.append(f"request {index}: another text from token {at} on")
    return wrong


def counts(stand: Stand) -> dict[str, float]:
    """What the pool has counted so far."""
    total = stand.total
    return {
        "evicted_pages": total("memd_evicted_pages_total"),
        "written_back_pages": total("memd_transfers_total", path="d2h"),
        "restored_pages": total("memd_transfers_total", path="h2d"),
        "failed_copies": total("memd_transfer_failures_total"),
        "preemptions": total("memd_preemptions_total"),
        "device_hit_tokens": total("memd_prefix_hit_tokens_total", tier="device"),
        "shared_prefix_steps": total("memd_engine_shared_prefix_steps_total"),
    }


def since(stand: Stand, before: dict[str, float]) -> dict[str, float]:
    """What has been counted since."""
    return {name: value - before[name] for name, value in counts(stand).items()}


def texts(facts: dict[str, Any], name: str, answers: list[Answer], expected: list[Answer]) -> bool:
    """Note how many texts are those expected; whether all are."""
    wrong = differing(answers, expected)
    facts[name] = f"{len(answers) - len(wrong)} of {len(answers)}"
    if wrong:
        facts[f"{name}_wrong"] = wrong[:4]
    return not wrong


def idle_and_clean(stand: Stand) -> list[str]:
    """What an audit finds once nothing runs."""
    audit = await_idle(stand.http)["audit"]
    return [] if audit["clean"] else [f"the audit was not clean: {audit}"]


def violations(*promises: tuple[object, str]) -> list[str]:
    """The texts of promises that were not kept."""
    return [text for kept, text in promises if not kept]


def pressure(stand: Stand) -> Found:
    """Requests whose KV is 20 times the pool, computed and then found on the host."""
    scale = stand.scale
    prompts = stand.prompts(scale.requests, scale.prompt, "pressure")
    bodies = [stand.body(prompt, scale.output) for prompt in prompts]
    began_at = time.monotonic()
    expected = stand.run(bodies)
    facts: dict[str, Any] = {"seconds_with_room": time.monotonic() - began_at}
    stand.post("/admin/v1/pool/flush")
    stand.change(memory__limit=f"{scale.small} tokens")
    stand.wait(lambda: stand.pool_tokens() <= scale.small, "the lower limit is in force")
    needed = scale.requests * (scale.prompt + scale.output)
    facts["kv_to_pool"] = needed / stand.pool_tokens()
    before, promises = counts(stand), []
    for name in ("cold", "again"):
        began_at = time.monotonic()
        answers = stand.run(bodies)
        facts[f"seconds_{name}"] = time.monotonic() - began_at
        promises.append((texts(facts, f"texts_{name}", answers, expected), f"{name}: texts differ"))
    facts |= since(stand, before)
    wrong = idle_and_clean(stand)
    stand.change(memory__limit=f"{scale.large} tokens")
    promises += [
        (facts[name] > 0, f"there were no {name.replace('_', ' ')}")
        for name in ("evicted_pages", "written_back_pages", "restored_pages", "preemptions")
    ]
    promises.append((facts["kv_to_pool"] >= 20, "the pool was not short"))
    promises.append((not facts["failed_copies"], "copies failed"))
    return facts, wrong + violations(*promises)


def kills(stand: Stand) -> Found:
    """The engine is killed while streams run, each time after it has generated some of them."""
    bodies, expected = long_streams(stand)
    facts: dict[str, Any] = {"pauses_seconds": []}
    share = STREAMS * stand.scale.stream_output / (KILLS + 2)
    restarts = stand.total("memd_engine_restarts_total")
    before = stand.total(GENERATED)  # by this engine; the next ones begin at nothing
    running = stand.start(bodies)
    for _ in range(KILLS):
        least = before + share
        stand.wait(lambda least=least: stand.total(GENERATED) > least, "tokens between kills")
        facts["pauses_seconds"].append(round(stand.kill_engine(), 2))
        before = 0.0
    same = texts(facts, "texts", running.result(), expected)
    facts["restarts"] = stand.total("memd_engine_restarts_total") - restarts
    return facts, idle_and_clean(stand) + violations(
        (same, "a stream was disturbed"), (facts["restarts"] == KILLS, "not as many restarts")
    )


def live(stand: Stand) -> Found:
    """Watermarks and the limit change while streams run over a pool with much cached."""
    scale = stand.scale
    bodies, expected = long_streams(stand)
    stand.run(
        [stand.body(each, 1) for each in stand.prompts(scale.requests, scale.filling, "fill")]
    )
    lower = STREAMS * (scale.prompt + scale.stream_output) * 5 // 4
    facts: dict[str, Any] = {}
    running = stand.start(bodies)
    stand.wait(lambda: stand.total("memd_requests_running") == STREAMS, "streams run")
    full, mapped = stand.memory_bytes(), stand.total(MAPPED)
    stand.change(memory__watermark__high="50%", memory__watermark__low="30%")
    facts["watermarks_in_force_seconds"] = stand.wait(
        lambda: stand.watermarks() == {"high": 0.5, "low": 0.3}, "other watermarks"
    )
    stand.change(memory__limit=f"{lower} tokens")
    block = stand.total("memd_pool_block_size_bytes")
    page, tokens = stand.total("memd_pool_page_size_bytes"), stand.total("memd_pool_page_tokens")
    facts["limit_in_force_seconds"] = stand.wait(
        lambda: stand.total(MAPPED) <= lower / tokens * page * 1.1 + block,
        "a lower limit",
    )
    fell = mapped - stand.total(MAPPED)
    least = 0.9 * fell - block
    facts["seen_seconds"] = stand.wait(
        lambda: full - stand.memory_bytes() >= least, "memory is seen to come back"
    )
    facts["given_back_bytes"], facts["seen_bytes"] = fell, full - stand.memory_bytes()
    under_load = not running.done()
    stand.change(
        memory__limit=f"{scale.large} tokens",
        **{"memory__watermark__high": "90%", "memory__watermark__low": "70%"},
    )
    same = texts(facts, "texts", running.result(), expected)
    return facts, idle_and_clean(stand) + violations(
        (same, "a stream was disturbed"),
        (fell > 0, "the pool gave nothing back"),
        (under_load, "the streams ended before the changes"),
    )


def shared(stand: Stand) -> Found:
    """Prompts that begin alike, each under a salt of its own and then together."""
    scale = stand.scale
    (beginning,) = stand.prompts(1, scale.shared, "shared")
    bodies = [
        stand.body(beginning + own, scale.output)
        for own in stand.prompts(scale.requests, scale.own, "own")
    ]
    facts: dict[str, Any] = {}
    began_at = time.monotonic()
    expected = stand.run([each | {"cache_salt": str(at)} for at, each in enumerate(bodies)])
    facts["seconds_alone"] = time.monotonic() - began_at
    stand.post("/admin/v1/pool/flush")
    before, began_at = counts(stand), time.monotonic()
    answers = stand.run(bodies)
    facts["seconds_shared"] = time.monotonic() - began_at
    facts |= since(stand, before)
    hits, could = facts["device_hit_tokens"], (scale.requests - 1) * scale.shared
    facts["hits_of_possible"] = hits / could
    same = texts(facts, "texts", answers, expected)
    promises = [(same, "texts differ"), (hits >= 0.9 * could, "the beginning was not shared")]
    if stand.device == "cuda":  # a CPU runs without graphs, and does not look for them
        used = facts["shared_prefix_steps"] > 0
        promises.append((used, "no step read the beginning once for several"))
    return facts, idle_and_clean(stand) + violations(*promises)


def open_loop(stand: Stand) -> Found:
    """Requests that arrive whatever the daemon does."""
    scale = stand.scale
    facts: dict[str, Any] = {}
    failed = []
    for rate in scale.rates:
        count = str(max(8, round(rate * scale.seconds)))
        given = ["--url", stand.url, "--mix", "random", "--requests", count, "--rate", str(rate)]
        given += ["--prompt-tokens", str(scale.prompt), "--output-tokens", str(scale.output)]
        given += ["--seed", count]  # other prompts at each rate
        result = asyncio.run(serve.measure(serve.parser().parse_args(given)))
        facts[f"{rate:g} requests/s"] = result
        failed += [f"{rate:g}/s: {each}" for each in result["failures"].items()]
    return facts, failed + idle_and_clean(stand)


def long_streams(stand: Stand) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Long requests and their undisturbed answers.

    Half of them sampled where no bit depends on what else is computed. Else all greedy: a draw from
    thousands of nearly equal tokens turns on the last bits in one token of some hundred.
    """
    prompts = stand.prompts(STREAMS, stand.scale.prompt, "streams")
    bodies = [
        stand.body(
            prompt,
            stand.scale.stream_output,
            seed=index,
            temperature=index % 2 if stand.invariant else 0,
        )
        for index, prompt in enumerate(prompts)
    ]
    return bodies, stand.undisturbed("long streams", bodies)


EXACT = ("model.dtype=float32",)
INVARIANT = ("engine.batch_invariant=true",)
# By name: the part, and what its daemon is told besides.
PARTS: dict[str, tuple[Callable[[Stand], Found], tuple[str, ...]]] = {
    "pressure": (pressure, EXACT),
    "kills": (kills, EXACT),
    "live": (live, EXACT),
    "shared": (shared, EXACT),
    "invariant": (kills, INVARIANT),
    "open": (open_loop, ()),
}
