"""What a large body may not do: hold the GIL, and with it everybody else, for long."""

import asyncio
import gc

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from memd.api.body import read_body
from memd.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from memd.api.schemas_pool import ExplainRequest
from memd.config import ServerSettings
from memd.errors import RequestError


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body}

    return Request({"type": "http", "headers": []}, receive)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (ChatRequest, "messages"),
        (CompletionRequest, "stop_token_ids"),
        (DetokenizeRequest, "tokens"),
        (ExplainRequest, "tokens"),
        (TokenizeRequest, "messages"),
    ],
)
def test_an_array_of_faults_is_one_error(schema: type[BaseModel], field: str) -> None:
    """pydantic makes an error of each: 10 s for the 3.6 million numbers of a body of 7 MiB."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate({"model": "tiny", "prompt": "a", field: ["x"] * 1000})
    assert len([each for each in caught.value.errors() if each["loc"][0] == field]) == 1


@pytest.mark.parametrize("more", [b"", b"]"])
def test_nothing_is_collected_while_a_large_body_is_decoded(more: bytes) -> None:
    """Also after a body that is no JSON, collection is on again."""
    body = b'{"model": "tiny", "prompt": "a", "other": [%s[]]%s}' % (b"[]," * 100_000, more)
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    async def read() -> str:
        return (await read_body(request_of(body), CompletionRequest, ServerSettings())).model

    gc.collect()
    gc.callbacks.append(note)
    try:
        if more:
            with pytest.raises(RequestError, match="not valid JSON"):
                asyncio.run(read())
        else:
            assert asyncio.run(read()) == "tiny"
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(collected) < 20  # 100,000 arrays would be 140 collections, of two phases each
