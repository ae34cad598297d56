"""Tenants, pins and the prompt cache against a daemon with keys, as their users see them."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from served import serving
from tiny import write_model

from memd.client import Client, ClientError
from memd.keys import KeysFile, make_key

pytestmark = pytest.mark.slow

ROLES = {
    "ann": (("inference",), (0, 5)),
    "bob": (("inference",), (0, 0)),
    "operator": (("metrics", "admin:read", "admin:write"), None),
}


class Place:
    """A daemon of 64 pages of 16 tokens, and a client for each key."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self.clients = {name: Client(url, key) for name, key in keys.items()}

    def __getattr__(self, name: str) -> Client:
        return self.clients[name]

    def complete(self, who: str, prompt: str, max_tokens: int = 4, **more: Any) -> Any:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **more}
        return self.clients[who].complete({"ignore_eos": True, "temperature": 0, **body})

    def wait_for(self, met: Any) -> Any:
        deadline = time.monotonic() + 60
        while not (found := met()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory: Path = tmp_path_factory.mktemp("state")
    model = write_model(tmp_path_factory.mktemp("model") / "m")
    file = KeysFile(directory / "keys.jsonl")
    keys = {}
    for name, (scopes, priority) in ROLES.items():
        keys[name], key = make_key(name, scopes, name, priority, None)
        file.add(key)
    settings = (
        f"server.keys_file={file.path}",
        "memory.page_tokens=16",
        "memory.limit=1024 tokens",
        "memory.host.limit=0",
        "memory.watermark.high=100%",
    )
    with serving(directory, str(model), *settings) as daemon:
        place = Place(daemon.url, keys)
        yield place
        for client in place.clients.values():
            client.close()


@pytest.fixture(autouse=True)
def empty(place: Place) -> None:
    for row in place.operator.prefixes(pinned="true")["prefixes"]:
        with suppress(ClientError):  # the pin of a longer one
            place.operator.unpin(row["id"], "test")
    place.operator.flush()


def tenant(place: Place, name: str) -> dict[str, Any]:
    rows = place.operator.tenants()["tenants"]
    return next((row for row in rows if row["name"] == name), {"used_bytes": 0})


def test_a_tenant_above_its_quota_loses_its_pages_first(place: Place) -> None:
    page_bytes = place.operator.pool()["layout"]["page_bytes"]
    place.operator.set_tenant("ann", "a test", quota="25%")
    for index in range(10):
        place.complete("ann", f"{index}" * 64)  # 40 pages and more; the quota is 16
    wait = place.wait_for(lambda: tenant(place, "ann")["used_bytes"] >= 40 * page_bytes)
    assert wait, "room that nobody needs may be used"
    for index in range(9):
        place.complete("bob", f"{index}" * 64)
    bob = place.wait_for(lambda: tenant(place, "bob")["used_bytes"] >= 36 * page_bytes)
    assert bob
    rows = place.operator.prefixes(tenant="bob")["prefixes"]
    assert sum(row["pages"] for row in rows) >= 36, "nothing of the one within its quota is gone"
    place.operator.unset_tenant("ann", "the test is over")
    history = place.operator.settings_history(key="tenants")["history"]
    assert [row["reason"] for row in history][-2:] == ["a test", "the test is over"]
    assert history[-1]["who"] == "operator"


def test_a_tenant_change_can_be_undone_and_wrong_ones_name_the_field(place: Place) -> None:
    place.operator.set_tenant("bob", "more for bob", quota="50%", weight=3.0)
    assert tenant(place, "bob")["weight"] == 3.0
    place.operator.undo_settings("never mind")
    assert tenant(place, "bob")["weight"] == 1.0
    for wrong in ({"quota": "150%"}, {"quota": "much"}, {"weight": 0.0}, {"wait": 1.0}):
        with pytest.raises(ClientError) as caught:
            place.operator.set_tenant("bob", "wrong", **wrong)
        assert caught.value.status == 400
        assert caught.value.param == next(iter(wrong))
    with pytest.raises(ClientError) as caught:
        place.operator.unset_tenant("nobody", "wrong")
    assert caught.value.status == 404


def test_a_priority_that_the_key_does_not_allow_is_counted(place: Place) -> None:
    before = tenant(place, "bob")["rejections"] if tenant(place, "bob")["used_bytes"] else 0
    with pytest.raises(ClientError) as caught:
        place.complete("bob", "x", priority=3)
    assert caught.value.param == "priority"
    assert 'memd_tenant_rejections_total{reason="priority",tenant="other"} ' in (
        place.operator.metrics()
    )
    place.complete("bob", "x" * 40)
    after = place.wait_for(lambda: tenant(place, "bob").get("rejections"))
    assert after == before + 1


def test_a_pinned_prefix_outlives_a_full_pool(place: Place) -> None:
    place.complete("ann", "s" * 128)
    (row,) = place.operator.prefixes(tenant="ann")["prefixes"]
    pinned = place.operator.pin(row["id"], None, "the system prompt")
    assert pinned["pinned_pages"] == 8
    for index in range(30):
        place.complete("bob", f"{index:02}" * 40)
    answer = place.complete("ann", "s" * 128 + "and more")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    pool = place.operator.pool()
    assert pool["pins"]["pinned"] >= 1
    with pytest.raises(ClientError) as caught:
        place.operator.evict_prefix("0" * 16, "no such")
    assert caught.value.status == 404
    kept = place.operator.evict_prefix(row["id"], "try")
    assert kept["kept_pages"] >= 8
    place.operator.unpin(row["id"], "over")
    assert place.operator.pool()["pinned_pages"] == 0
    assert place.wait_for(
        lambda: (
            {"prefix_pinned", "prefix_evicted", "prefix_unpinned"}
            <= {event["kind"] for event in place.operator.events()["events"]}
        )
    )


def test_a_pin_over_the_budget_is_refused_with_the_numbers(place: Place) -> None:
    place.complete("ann", "long" * 80)  # 20 pages; a quarter of 64 is 16
    (row,) = place.operator.prefixes(tenant="ann")["prefixes"]
    with pytest.raises(ClientError, match=r"needs 20 pages more, 0 are pinned and the limit is 16"):
        place.operator.pin(row["id"], 60.0, "too much")


def test_requests_pin_by_ttl_and_by_breakpoint(place: Place) -> None:
    answer = place.complete("ann", "t" * 70, prompt_cache_options={"ttl": "10m"})
    assert answer["usage"]["memd"]["pinned_tokens"] == 64
    messages = [
        {
            "role": "system",
            "content": [
                {
                    "type": "text",
                    "text": "r" * 57,
                    "prompt_cache_breakpoint": {"mode": "explicit"},
                },
                {"type": "text", "text": "not pinned, whatever it says"},
            ],
        },
        {"role": "user", "content": "hello"},
    ]
    body = {"model": "m", "messages": messages, "max_tokens": 2, "prompt_cache_key": "app 7"}
    answer = place.ann.chat({**body, "prompt_cache_options": {"mode": "explicit", "ttl": "5m"}})
    assert answer["usage"]["memd"]["pinned_tokens"] == 64  # "<system>" and 57 letters: 65 tokens
    rows = place.operator.prefixes(pinned="true")["prefixes"]
    labels = {row["pin_label"] for row in rows if row["start_token"] == 0}
    assert None in labels
    assert len(labels) == 2
    assert "app 7" not in labels
    assert all(0 < row["pinned_until"] - time.time() < 601 for row in rows)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "25h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "always"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
    ],
)
def test_unknown_values_of_the_prompt_cache_are_refused(
    place: Place, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ClientError) as caught:
        place.complete("ann", "x", **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_explain_tells_where_a_prompt_stops_to_match(place: Place) -> None:
    place.complete("ann", "a" * 80)
    found = place.operator.explain_prefix("a" * 50 + "b" * 50, tenant="ann")
    assert found["hit_tokens"] == {"device": 50, "host": 0, "disk": 0}
    assert found["first_missing_token"] == 50
    assert found["reason"] == "differs"
    assert found["nearest"]["tokens"] >= 80
    other = place.operator.explain_prefix("a" * 80, tenant="bob")
    assert (other["reason"], other["hit_tokens"]["device"]) == ("isolated", 0)
    assert other["elsewhere_tokens"] == 79
    whole = place.operator.explain_prefix("a" * 80, tenant="ann")
    assert (whole["reason"], whole["computed_tokens"]) == ("complete", 1)
    new = place.operator.explain_prefix("z", tenant="ann")
    assert new["nearest"] is None
    with pytest.raises(ClientError) as caught:
        place.operator.explain_prefix(request_id="nobody")
    assert caught.value.status == 404


def test_c008_c022_probes_change_neither_pins_nor_leases(place: Place) -> None:
    """A lookup keeps nothing: pages found by 100 probes go as if nobody had asked."""
    place.complete("ann", "p" * 64)
    (row,) = place.operator.prefixes(tenant="ann")["prefixes"]
    for index in range(100):
        place.operator.explain_prefix("p" * 64, tenant="ann")
        if index % 4 == 0:
            place.complete("bob", f"{index:03}" * 50)  # in all 3 times the pool
    pool = place.operator.pool()
    assert pool["pinned_pages"] == pool["promised_pages"] == 0
    assert pool["allocations"]["failed"] == 0
    assert row["id"] not in {each["id"] for each in place.operator.prefixes()["prefixes"]}
