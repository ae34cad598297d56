"""API keys: which one opens what, and what else a key decides."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import openai
import pytest
from http_stand import Stand

from memd.engine.messages import Submit
from memd.keys import SCOPES, KeysFile, make_key

MakeKey = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path) -> KeysFile:
    path = tmp_path / "keys.jsonl"
    path.touch()
    return KeysFile(path)


@pytest.fixture
def make(keys: KeysFile) -> MakeKey:
    def add(name: str, *scopes: str, tenant: str = "t", priority=None, lifetime=None) -> str:
        text, key = make_key(name, scopes, tenant, priority, lifetime)
        keys.add(key)
        return text

    return add


@pytest.fixture
def locked(make_stand: Callable[..., Stand], keys: KeysFile) -> Stand:
    return make_stand(settings={"server.keys_file": str(keys.path)})


def call(stand: Stand, method: str, path: str, key: str | None = None) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return stand.http.request(method, path, headers=headers)


ROUTES = [
    ("POST", "/v1/completions", "inference"),
    ("POST", "/v1/chat/completions", "inference"),
    ("GET", "/v1/models", "inference"),
    ("GET", "/v1/models/tiny", "inference"),
    ("POST", "/tokenize", "inference"),
    ("POST", "/detokenize", "inference"),
    ("GET", "/nothing/here", "inference"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/admin/v1/status", "admin:read"),
    ("GET", "/admin/v1/pool", "admin:read"),
    ("GET", "/admin/v1/requests", "admin:read"),
    ("GET", "/admin/v1/settings", "admin:read"),
    ("GET", "/admin/v1/debug/faults", "admin:read"),
    ("PUT", "/admin/v1/debug/faults", "admin:write"),
    ("POST", "/admin/v1/pool/flush", "admin:write"),
    ("DELETE", "/admin/v1/requests/x", "admin:write"),
    ("PATCH", "/admin/v1/settings", "admin:write"),
    ("POST", "/admin/v1/settings/preview", "admin:write"),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
]


def test_each_route_asks_for_its_scope(locked: Stand, make: MakeKey) -> None:
    by_scope = {scope: make(scope.replace(":", "-"), scope) for scope in SCOPES}
    for method, path, needed in ROUTES:
        refused = call(locked, method, path)
        assert refused.status_code == 401, path
        assert refused.headers["www-authenticate"].startswith("Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        for scope, key in by_scope.items():
            response = call(locked, method, path, key)
            if needed in (None, scope):
                assert response.status_code not in (401, 403), (path, scope)
            else:
                assert response.status_code == 403, (path, scope)
                assert response.json()["error"]["code"] == "insufficient_scope"
                assert str(needed) in response.json()["error"]["message"]


def test_health_is_open(locked: Stand) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert locked.http.get(path).status_code == 200


def test_health_tells_no_stranger_why_the_engine_failed(locked: Stand) -> None:
    locked.on_loop(lambda: locked.client.fail("no such file: /srv/models/secret"))
    for path in ("/health", "/health/live", "/health/ready"):
        assert locked.wait_for(lambda path=path: locked.http.get(path).status_code == 503)
        assert locked.http.get(path).json() == {"status": "failed"}


@pytest.mark.parametrize(
    "path",
    ["//metrics", "/metrics/", "/health/../metrics", "/health%2f..%2fmetrics", "/%6detrics", "/x"],
)
def test_no_spelling_of_a_path_gets_by(locked: Stand, path: str) -> None:
    assert locked.http.get(path).status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer memd-wrong",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer x{key}",
        "Bearer {key} {key}",
        "Bearer " + "x" * 5000,
        "Bearer \xff",
    ],
)
def test_headers_that_open_nothing(locked: Stand, make: MakeKey, header: str) -> None:
    key = make("a", "inference")
    value = header.format(key=key).encode("latin-1")
    response = locked.http.get("/v1/models", headers={"authorization": value})
    assert response.status_code == 401
    assert key not in response.text
    twice = [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")]
    assert locked.http.get("/v1/models", headers=twice).status_code == 401


def test_keys_come_and_go_while_the_daemon_runs(
    locked: Stand, make: MakeKey, keys: KeysFile
) -> None:
    key = make("a", "inference")
    other = make("b", "inference")
    assert call(locked, "GET", "/v1/models", key).status_code == 200
    keys.revoke("a")
    assert call(locked, "GET", "/v1/models", key).status_code == 401
    assert call(locked, "GET", "/v1/models", other).status_code == 200


def test_a_key_expires(locked: Stand, make: MakeKey) -> None:
    key = make("brief", "inference", lifetime=0.3)
    assert call(locked, "GET", "/v1/models", key).status_code == 200
    time.sleep(0.3)
    response = call(locked, "GET", "/v1/models", key)
    assert response.status_code == 401
    assert "brief has expired" in response.json()["error"]["message"]


def test_tenants_share_nothing(locked: Stand, make: MakeKey) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    sent = {}
    for name, tenant, salt in (
        ("a", "one", None),
        ("b", "two", None),
        ("c", "one", None),
        ("d", "one", "s"),
        ("e", "two", "s"),
    ):
        headers = {"authorization": f"Bearer {make(name, 'inference', tenant=tenant)}"}
        answer = locked.http.post(
            "/v1/completions", json={**body, "cache_salt": salt}, headers=headers
        )
        assert answer.status_code == 200
        submit = locked.sequence_of(answer)
        assert submit.tenant == tenant
        sent[name] = submit.salt
    assert sent["a"] == sent["c"]
    assert len(set(sent.values())) == 4
    headers = {"authorization": f"Bearer {make('f', 'inference')}"}
    crafted = {**body, "cache_salt": "one\0s"}
    refused = locked.http.post("/v1/completions", json=crafted, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize(
    ("allowed", "wanted", "given"),
    [
        ((0, 5), 3, 3),
        ((0, 5), None, 0),
        ((2, 5), None, 2),
        ((-9, -3), None, -3),
        ((0, 5), 6, None),
        ((0, 5), -1, None),
        (None, -(2**31), -(2**31)),
    ],
)
def test_priorities_have_a_range(
    locked: Stand, make: MakeKey, allowed: tuple, wanted: int | None, given: int | None
) -> None:
    headers = {"authorization": f"Bearer {make('a', 'inference', priority=allowed)}"}
    body = {"model": "tiny", "prompt": "hi", "priority": wanted}
    answer = locked.http.post("/v1/completions", json=body, headers=headers)
    if given is None:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"
        assert "the API key a allows 0 to 5" in answer.json()["error"]["message"]
        assert locked.engine.of(Submit) == []
    else:
        assert locked.sequence_of(answer).priority == given


def test_the_openai_client(locked: Stand, make: MakeKey) -> None:
    key = make("a", "inference")
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key) as client:
        assert client.completions.create(model="tiny", prompt="hi").choices[0].text == "Hello!"
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="memd-wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key=make("m", "metrics")) as client,
        pytest.raises(openai.PermissionDeniedError),
    ):
        client.models.list()


def test_refusals_are_counted_and_changes_bear_the_name(locked: Stand, make: MakeKey) -> None:
    key = make("boss", *SCOPES)
    headers = {"authorization": f"Bearer {key}"}
    locked.http.get("/v1/models")
    locked.http.get("/v1/models", headers={"authorization": f"Bearer {make('m', 'metrics')}"})
    text = locked.http.get("/metrics", headers=headers).text
    assert 'memd_requests_total{endpoint="models",model="tiny",outcome="unauthorized"} 2.0' in text
    body = {"revision": 1, "reason": "r", "changes": {"engine.max_waiting": 7}, "who": "me"}
    changed = locked.http.patch("/admin/v1/settings", json=body, headers=headers)
    assert changed.json()["settings"]["engine"]["max_waiting"] == 7
    history = locked.http.get("/admin/v1/settings/history", headers=headers).json()["history"]
    assert history[-1]["who"] == "boss"
    text = locked.http.get("/metrics", headers=headers).text
    assert 'memd_setting{key="engine.max_waiting"} 7.0' in text


def test_the_document_says_that_keys_are_asked_for(locked: Stand, make: MakeKey) -> None:
    document = call(locked, "GET", "/openapi.json", make("a", "inference")).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert document["paths"]["/health/ready"]["get"]["security"] == []
