"""Prefixes, tenants and the prompt cache over HTTP, against a scripted engine."""

import pytest
from http_stand import Stand

from memd.engine.messages import ApplySettings, Describe, Explain, PrefixCommand, Submit


def test_prefix_filters_reach_the_engine(stand: Stand):
    response = stand.http.get(
        "/admin/v1/prefixes?limit=5&sort=hits_per_hour&tenant=ann&pinned=true"
    )
    assert response.status_code == 200
    asked = stand.engine.of(Describe)[-1]
    assert (asked.limit, asked.sort, asked.tenant, asked.pinned) == (
        5,
        "hits_per_hour",
        "ann",
        True,
    )
    assert stand.http.get("/admin/v1/prefixes?sort=beauty").status_code == 400


def test_prefix_actions_say_what_and_why(stand: Stand):
    body = {"reason": "the system prompt", "ttl_seconds": 60.0}
    assert stand.http.post("/admin/v1/prefixes/00ff/pin", json=body).status_code == 200
    command = stand.engine.of(PrefixCommand)[-1]
    assert (command.action, command.prefix_id, command.ttl_seconds) == ("pin", "00ff", 60.0)
    for wrong, param in (({}, "reason"), ({**body, "ttl_seconds": 0}, "ttl_seconds")):
        response = stand.http.post("/admin/v1/prefixes/00ff/pin", json=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert stand.http.post("/admin/v1/prefixes/00ff/evict", json={}).status_code == 400


@pytest.mark.parametrize(
    ("body", "tokens", "salt"),
    [
        ({"prompt": "abc"}, [97, 98, 99], ""),
        ({"tokens": [5, 6], "tenant": "ann"}, [5, 6], "ann\0"),
        ({"tokens": [5], "tenant": "ann", "cache_salt": "s"}, [5], "ann\0s"),
    ],
)
def test_explain_asks_with_the_salt_that_a_request_would_have(
    stand: Stand, body: dict, tokens: list[int], salt: str
):
    assert stand.http.post("/admin/v1/prefixes/explain", json=body).status_code == 200
    asked = stand.engine.of(Explain)[-1]
    assert (asked.tokens, asked.salt) == (tokens, salt)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "tokens": [1]}, {"tokens": []}])
def test_explain_wants_one_prompt(stand: Stand, body: dict):
    asked = len(stand.engine.of(Explain))
    assert stand.http.post("/admin/v1/prefixes/explain", json=body).status_code == 400
    assert len(stand.engine.of(Explain)) == asked


def test_a_tenant_is_a_live_setting_with_history(stand: Stand):
    body = {"quota": "20%", "weight": 2.0, "reason": "paying", "who": "op"}
    answer = stand.http.put("/admin/v1/tenants/ann", json=body).json()
    assert (answer["quota"], answer["weight"], answer["configured"]) == ("20%", 2.0, True)
    applied = stand.engine.of(ApplySettings)[-1]
    assert applied.values == {"tenants": [{"name": "ann", "quota": "20%", "weight": 2.0}]}
    stale = stand.http.put("/admin/v1/tenants/bob", json={**body, "revision": 1})
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "stale_revision")
    row = stand.http.get("/admin/v1/settings/history").json()["history"][-1]
    assert (row["who"], row["reason"], list(row["changes"])) == ("op", "paying", ["tenants"])
    assert stand.http.get("/admin/v1/tenants/ann").json()["rejections"] == 0
    assert stand.http.get("/admin/v1/tenants/nobody").status_code == 404
    gone = stand.http.request("DELETE", "/admin/v1/tenants/ann", json={"reason": "left"})
    assert gone.status_code == 200
    assert stand.http.get("/admin/v1/tenants/ann").status_code == 404


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("ann", {"quota": "120%"}, "quota"),
        ("ann", {"quota": 0}, "quota"),
        ("ann", {"weight": 0}, "weight"),
        ("a b", {"quota": "5%"}, "name"),
    ],
)
def test_a_wrong_tenant_is_refused(stand: Stand, name: str, body: dict, param: str):
    response = stand.http.put(f"/admin/v1/tenants/{name}", json={"reason": "x", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def marked(text: str, mode: str = "explicit") -> dict:
    return {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": mode}}


def test_breakpoints_become_a_pin_of_the_first_choice(stand: Stand):
    messages = [
        {"role": "system", "content": [marked("keep this"), {"type": "text", "text": " not this"}]},
        {"role": "user", "content": "hi"},
    ]
    response = stand.chat(messages=messages, n=2, prompt_cache_options={"ttl": "90s"})
    assert response.status_code == 200
    name = response.json()["id"]
    first, second = (each for each in stand.engine.of(Submit) if each.request_id.startswith(name))
    prompt = bytes(first.prompt_tokens).decode()
    assert prompt[: first.pin.tokens].endswith("keep this")
    assert first.pin.ttl_seconds == 90
    assert second.pin is None


@pytest.mark.parametrize(
    "content",
    [[marked("x", "implicit")], [marked(str(index)) for index in range(5)]],
)
def test_breakpoints_that_make_no_sense_are_refused(stand: Stand, content: list):
    response = stand.chat(messages=[{"role": "user", "content": content}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_the_model_card_tells_that_the_prompt_cache_is_honoured(stand: Stand):
    card = stand.http.get("/v1/models/tiny").json()
    assert "prompt_cache_options" in card["capabilities"]["prompt_cache"]
