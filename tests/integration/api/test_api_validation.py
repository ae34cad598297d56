"""Every bad field gets a 400 that names it; every good one reaches the engine as documented."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_stand import byte_tokenizer

from memd.engine.messages import Submit

INT64_MAX = 2**63 - 1

BAD_IN_BOTH = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("top_p", 1.0000001),
    ("top_p", -0.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-320),
    ("repetition_penalty", 10.1),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("min_tokens", 17),
    ("seed", 2**63),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stop", ["x" * 1001]),
    ("stop_token_ids", [258]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"1": 100.5}),
    ("logit_bias", {"258": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": True}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("priority", 2**31),
    ("cache_salt", 5),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", "text"),
    ("suffix", "tail"),
    ("audio", {"voice": "x"}),
    ("modalities", ["audio"]),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_IN_BOTH)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bad_field_is_named(stand: Any, path: str, field: str, value: object) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 16, field: value}
    body |= {"prompt": "hi"} if "chat" not in path else {"messages": [_user("hi")]}
    response = stand.http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].split("[")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "a\0b"}, "prompt"),
        ({"prompt": ["x"] * 17, "n": 128}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_bad_completion(stand: Any, changes: dict[str, Any], param: str) -> None:
    response = stand.complete(**changes)
    assert response.status_code == 400
    assert response.json()["error"]["param"].split("[")[0] == param
    assert stand.complete(max_tokens=1).status_code == 200


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [_user(None)]}, "messages"),
        ({"messages": [_user(5)]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [_user([{"type": "image_url", "image_url": {}}])]}, "messages"),
        ({"messages": [_user([{"type": "text"}])]}, "messages"),
        ({"messages": [_user("a\0")]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_chat(stand: Any, changes: dict[str, Any], param: str) -> None:
    response = stand.chat(**changes)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b'{"model":"tiny","prompt":"a\\ud800b"}',
        b'{"model":"tiny","prompt":"end \\udfff"}',
        b'{"model":"tiny","prompt":"hi","user":"\\udfff"}',
        b'{"model":"tiny","prompt":"\xff"}',
        b'{"model":"tiny","prompt":"hi","temperature":NaN}',
        b'{"model":"tiny","prompt":"hi","other":Infinity}',
        b'{"model":"tiny","prompt":"hi","temperature":1e999}',
        b'{"model":"tiny","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_is_no_json_object(stand: Any, path: str, body: bytes) -> None:
    response = stand.http.post(path, content=body)
    assert response.status_code == 400
    assert "request body" in response.json()["error"]["message"]
    for leak in ("Traceback", "msgspec", "pydantic", "Error(", "detail"):
        assert leak not in response.text


def test_a_paired_surrogate_is_a_character(stand: Any) -> None:
    body = b'{"model":"tiny","prompt":"\\ud83d\\ude00","max_tokens":1}'
    response = stand.http.post("/v1/completions", content=body)
    assert response.status_code == 200
    assert stand.sequence_of(response).prompt_tokens == list("😀".encode())


def test_unknown_and_null_fields_are_accepted(stand: Any) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options")
    )
    for field in ("user", "metadata", "store", "service_tier", "verbosity", "strange"):
        assert stand.chat(**{field: {"a": [1]}}, **nulls).status_code == 200
    response = stand.chat(
        tools=[], tool_choice="none", modalities=["text"], response_format={"type": "text"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_p": 0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"top_p": 1e-9}, {"top_p": 1e-9}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 258}, {"top_k": 258}),
        ({"top_k": 259}, {"top_k": 0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({}, {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "ignore_eos": False}),
        ({"logit_bias": {"5": -100, "257": 100}}, {"logit_bias": {5: -100.0, 257: 100.0}}),
        ({"min_tokens": 16}, {"min_tokens": 16}),
        (
            {"stop_token_ids": [65], "ignore_eos": True},
            {"stop_token_ids": [65], "ignore_eos": True},
        ),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": INT64_MAX}, {"seed": INT64_MAX}),
        ({"logprobs": 0}, {"logprobs": 0, "prompt_logprobs": None}),
        ({"logprobs": 2, "echo": True}, {"logprobs": 2, "prompt_logprobs": 2}),
    ],
)
def test_what_the_engine_is_asked(
    stand: Any, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = stand.sequence_of(stand.complete(**given)).sampling
    assert {key: getattr(sampling, key) for key in expected} == expected


@pytest.mark.parametrize("seed", [None, -1])
def test_a_random_seed_differs_each_time(stand: Any, seed: int | None) -> None:
    seeds = {stand.sequence_of(stand.complete(seed=seed)).sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= each <= INT64_MAX for each in seeds)


def test_choices_have_seeds_of_their_own(stand: Any) -> None:
    def seeds() -> list[int]:
        prefix = stand.complete(n=3, seed=7).json()["id"]
        return [
            submit.sampling.seed
            for submit in stand.engine.of(Submit)
            if submit.request_id.startswith(prefix)
        ]

    first = seeds()
    assert first[0] == 7
    assert len(set(first)) == 3
    assert first == seeds()


def test_extensions_reach_the_engine(stand: Any) -> None:
    submit = stand.sequence_of(stand.complete(priority=-3, cache_salt="s1", session_id="x"))
    assert (submit.priority, submit.salt) == (-3, "s1")


def test_lengths_around_the_limit(stand: Any) -> None:
    for length, status in ((199, 200), (200, 400), (201, 400)):
        response = stand.complete(prompt=[65] * length, max_tokens=1)
        assert response.status_code == status, length
        if status == 400:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 200 tokens" in error["message"]
            assert str(length) in error["message"]
    response = stand.complete(max_tokens=199)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    too_long = stand.chat(messages=[_user("x" * 200)]).json()["error"]
    assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "messages")


def test_a_prompt_larger_than_the_pool_names_both_sizes(make_stand: Callable[..., Any]) -> None:
    stand = make_stand(max_model_len=2048, capacity_pages=64)
    error = stand.complete(prompt=[65] * 1100).json()["error"]
    assert "needs 69 pages of 16 tokens, the pool holds 64" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert stand.complete(max_tokens=5).status_code == 200


def test_a_text_surely_too_long_is_not_tokenised(stand: Any) -> None:
    longest = stand.model.tokenizer.max_token_bytes
    response = stand.complete(prompt="x" * (200 * longest + 1))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert f"{200 * longest + 1} bytes" in response.json()["error"]["message"]


def test_an_empty_prompt_with_bos_is_one_token(make_stand: Callable[..., Any]) -> None:
    stand = make_stand(byte_tokenizer(adds_bos=True))
    response = stand.complete(prompt="", max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == 1
    assert stand.complete(prompt=[[1, 2], []]).status_code == 400


def test_chat_fills_the_room_left(stand: Any) -> None:
    response = stand.chat()
    prompt_tokens = response.json()["usage"]["prompt_tokens"]
    assert stand.sequence_of(response).sampling.max_tokens == 200 - prompt_tokens
    both = stand.chat(max_tokens=3, max_completion_tokens=4)
    assert stand.sequence_of(both).sampling.max_tokens == 4


def test_chat_renders_the_template(stand: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    submit = stand.sequence_of(stand.chat(messages=[_user(parts)]))
    assert bytes(submit.prompt_tokens) == b"<user>ab<assistant>"
    messages = [_user("a"), {"role": "assistant", "content": "so"}]
    submit = stand.sequence_of(stand.chat(messages=messages, continue_final_message=True))
    assert bytes(submit.prompt_tokens) == b"<user>a<assistant>so"


def test_a_model_without_tokenizer(make_stand: Callable[..., Any]) -> None:
    stand = make_stand(has_tokenizer=False)
    assert stand.complete(prompt="text").json()["error"]["param"] == "prompt"
    assert stand.chat().json()["error"]["param"] == "messages"
    choice = stand.complete(prompt=[1, 2], logprobs=1).json()["choices"][0]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"][0] == "token_id:72"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(make_stand: Callable[..., Any], chunked: bool) -> None:
    stand = make_stand(settings={"server.max_body": 2000})
    body = json.dumps({"model": "tiny", "prompt": "x" * 3000}).encode()
    pieces = (body[at : at + 500] for at in range(0, len(body), 500))
    response = stand.http.post("/v1/completions", content=pieces if chunked else body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert "2000" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/responses", 404, "not_found"),
        ("GET", "/v1/completions", 405, "not_found"),
        ("GET", "/v1/models/other/model", 404, "model_not_found"),
        ("GET", "/admin/v1/pool/blocks?limit=x", 400, None),
        ("GET", "/admin/v1/pool/blocks?offset=-1", 400, None),
    ],
)
def test_other_errors_have_the_same_shape(
    stand: Any, method: str, path: str, status: int, code: str | None
) -> None:
    response = stand.http.request(method, path)
    assert response.status_code == status
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code


def test_a_wrong_model_is_404(stand: Any) -> None:
    response = stand.complete(model="gpt-5")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back(stand: Any) -> None:
    tokens = stand.http.post("/tokenize", json={"model": "tiny", "prompt": "hé"}).json()
    assert tokens == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 200}
    text = stand.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "hé"}
    chat = stand.http.post("/tokenize", json={"messages": [_user("a")]}).json()
    assert bytes(chat["tokens"]) == b"<user>a<assistant>"
    assert stand.http.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert stand.http.post("/tokenize", json={}).json()["error"]["param"] == "prompt"


def test_the_schema_names_every_body(stand: Any) -> None:
    document = stand.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["ChatRequest"]["properties"]
    assert "422" not in json.dumps(document)
