"""The `openai` client, sync and async, as its users call it."""

import asyncio

import openai
import pytest
from http_stand import Stand, say

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def client(stand: Stand):
    with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[USER], seed=1, logprobs=True, top_logprobs=2, n=2, stop=["!"]
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content) == 6
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.system_fingerprint == "fp_test"
    assert answer._request_id.startswith("req-")


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="tiny", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello!"
    assert chunks[-1].usage.total_tokens == 26


def test_completions(client):
    answer = client.completions.create(
        model="tiny", prompt=["hi", "ho"], logprobs=1, echo=True, max_tokens=2
    )
    assert [choice.text for choice in answer.choices] == ["hiHe", "hoHe"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    pieces = client.completions.create(model="tiny", prompt=[104, 105], stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == "Hello!"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 200
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("org/other")
    assert error.value.code == "model_not_found"


def test_errors(client, stand: Stand):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=[USER], temperature=9)
    assert error.value.param == "temperature"
    stand.on_loop(lambda: setattr(stand.client, "_draining", True))
    try:
        with pytest.raises(openai.InternalServerError) as unavailable:
            client.chat.completions.create(model="tiny", messages=[USER])
        assert unavailable.value.code == "draining"
    finally:
        stand.on_loop(lambda: setattr(stand.client, "_draining", False))


def test_an_error_inside_a_stream_raises(client, stand: Stand):
    stand.engine.script = say("x" * 100, pause=0.02)
    stream = client.chat.completions.create(model="tiny", messages=[USER], stream=True)
    stand.http.delete(f"/admin/v1/requests/{next(iter(stream)).id}")
    with pytest.raises(openai.APIError, match="cancelled"):
        list(stream)


def test_async_clients_side_by_side(stand: Stand):
    async def one(client: openai.AsyncOpenAI, stream: bool) -> str:
        answer = await client.chat.completions.create(model="tiny", messages=[USER], stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, bool(i % 2)) for i in range(16)))

    assert set(asyncio.run(many())) == {"Hello!"}


def test_closing_a_stream_ends_the_request(client, stand: Stand):
    stand.engine.script = say("x" * 100, pause=0.02)
    stream = client.chat.completions.create(model="tiny", messages=[USER], stream=True)
    next(iter(stream))
    stream.close()
    assert stand.wait_for(lambda: not stand.client.open)
