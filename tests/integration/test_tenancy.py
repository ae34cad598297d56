"""Quotas, weights and pins in the engine as a whole, step by step."""

from toy import Harness

from memd.engine.messages import (
    ApplySettings,
    Describe,
    Explain,
    PinWish,
    PrefixCommand,
    SamplingParams,
    Submit,
)


def prompt(length: int, first: int) -> list[int]:
    return [(first * 37 + index * 11) % 90 + 2 for index in range(length)]


def tenants(*entries: tuple[str, str | None, float]) -> ApplySettings:
    """A change of the setting `tenants`, as the api process sends it."""
    rows = [{"name": name, "quota": quota, "weight": weight} for name, quota, weight in entries]
    return ApplySettings(1, 2, {"tenants": rows})


def test_above_its_quota_a_tenant_may_use_what_nobody_needs() -> None:
    harness = Harness()
    harness.send(tenants(("ann", "25%", 1.0)))
    for index in range(3):
        harness.submit(prompt(256, index), 4, tenant="ann")
    harness.step(3)
    assert harness.engine.snapshot().tenants["ann"].running == 3
    harness.finish()
    seen = harness.engine.snapshot().tenants["ann"]
    assert seen.quota_pages == 16
    assert seen.used_pages > 32


def test_above_its_quota_a_tenants_new_requests_wait_while_others_need_memory() -> None:
    harness = Harness("memory.host.limit=0")
    harness.send(tenants(("ann", "25%", 1.0)))
    held = [harness.submit(prompt(330, index), 60, tenant="ann") for index in range(2)]
    harness.step(3)
    bob = harness.submit(prompt(600, 8), 4, tenant="bob")  # more than is left
    harness.step()
    late = harness.submit(prompt(160, 7), 4, tenant="ann", priority=-5)  # there is room for it
    harness.step()
    scheduler = harness.engine.scheduler
    assert scheduler.waiting_for[bob] == "capacity"
    assert scheduler.waiting_for[late] == "quota"
    assert harness.engine.snapshot().waiting["quota"] == 1
    harness.finish()
    assert all(harness.end(name).finish_reason == "length" for name in (*held, late, bob))


def test_a_tenant_above_its_quota_is_the_first_to_be_preempted() -> None:
    harness = Harness("memory.host.limit=0", "engine.reserve_tokens=0")
    harness.send(tenants(("ann", "10%", 1.0)))
    ann = harness.submit(prompt(480, 1), 100, tenant="ann")
    bob = harness.submit(prompt(480, 2), 100, tenant="bob")  # comes last, and would have to go
    preempted = set()
    for _ in range(120):
        harness.step()
        for request in harness.engine.scheduler.requests.values():
            if request.preemptions:
                preempted.add(request.id)
    harness.finish()
    assert preempted == {ann}
    assert harness.end(ann).finish_reason == harness.end(bob).finish_reason == "length"


def test_twice_the_weight_gets_twice_the_tokens() -> None:
    harness = Harness("engine.max_sequences=1", "memory.host.limit=0")
    harness.send(tenants(("ann", None, 2.0), ("bob", None, 1.0)))
    for index in range(30):
        harness.submit(prompt(64, index), 2, tenant="ann", salt="a")
        harness.submit(prompt(64, 50 + index), 2, tenant="bob", salt="b")
    while sum(len(each) > 0 for each in harness.outputs.values()) < 30:
        harness.step()
    seen = harness.engine.snapshot().tenants
    ratio = seen["ann"].computed_tokens / seen["bob"].computed_tokens
    assert 1.8 < ratio < 2.2
    harness.finish()


def pin(harness: Harness, tokens: list[int], wanted: int, request_id: str) -> None:
    sampling = SamplingParams(seed=1, max_tokens=4, temperature=0.0)
    wish = PinWish(wanted, 3600.0, "label")
    harness.send(Submit(request_id, tokens, sampling, pin=wish))
    harness.finish()


def test_a_request_pins_what_it_asked_for_and_survives_preemption() -> None:
    harness = Harness()
    pin(harness, prompt(200, 3), 170, "one")
    assert harness.outputs["one"][0].pinned_tokens == 160
    assert harness.engine.pool.pages.pinned == 10
    pin(harness, prompt(400, 4), 400, "two")  # 25 pages, and 6 are left of the budget of 16
    assert harness.outputs["two"][0].pinned_tokens == 0
    assert harness.end("two").finish_reason == "length"
    assert harness.engine.snapshot().pool.pins["refused"] == 1
    rows = harness.ask(Describe(5, "prefixes", pinned=True)).result
    assert rows is not None
    assert [row["pin_label"] for row in rows["prefixes"]] == ["label"]


def test_a_request_that_pins_leave_no_room_for_ends_with_the_numbers() -> None:
    harness = Harness("memory.pin_limit=100%")
    pin(harness, prompt(700, 5), 700, "pinned")
    name = harness.submit(prompt(500, 6), 4)
    harness.finish()
    end = harness.end(name)
    assert end.error_code == "pool_exhausted"
    assert "of 64 43 are pinned" in (end.error or "")


def test_prefix_commands_by_name() -> None:
    harness = Harness()
    harness.generate(prompt(100, 9), 4)
    rows = harness.ask(Describe(1, "prefixes")).result
    assert rows is not None
    name = rows["prefixes"][0]["id"]
    pinned = harness.ask(PrefixCommand(2, "pin", name, 60.0)).result
    assert pinned is not None
    assert (pinned["found"], pinned["pinned_pages"], pinned["pinned_tokens"]) == (True, 6, 96)
    assert harness.ask(PrefixCommand(3, "evict", name)).result == {
        "found": True,
        "id": name,
        "evicted_pages": 1,
        "kept_pages": 6,
    }
    assert harness.ask(PrefixCommand(4, "unpin", name)).error is None
    assert "not pinned" in (harness.ask(PrefixCommand(5, "unpin", name)).error or "")
    assert harness.ask(PrefixCommand(6, "pin", "0" * 16)).result == {"found": False}
    assert harness.ask(PrefixCommand(7, "pin", "no name")).result == {"found": False}
    found = harness.ask(Explain(8, prompt(100, 9))).result
    assert found is not None
    assert found["hit_tokens"] == {"device": 96, "host": 0, "disk": 0}
