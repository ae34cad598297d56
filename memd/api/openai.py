"""The OpenAI API: completions, chat completions, models; and vLLM's tokenize and detokenize."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from memd.api.answer import Answer, Kind
from memd.api.auth import Caller
from memd.api.body import body_schema, json_response, read_body
from memd.api.envelope import is_sane_id
from memd.api.model import ServedModel
from memd.api.prepare import (
    Job,
    need_tokenizer,
    prepare_chat,
    prepare_completion,
    refuse_surely_too_long,
    render,
)
from memd.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    answers,
)
from memd.api.service import Service
from memd.api.stream import EventStream, while_connected
from memd.errors import RequestError

# Honoured here; many clients leave them out for servers that are not OpenAI's.
PROMPT_CACHE_FIELDS = [
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prompt_cache_breakpoint",
]


def openai_routes(service: Service) -> APIRouter:
    """All routes that inference clients use."""
    router = APIRouter(tags=["openai"], responses=answers(401, 403, 404, 500, 503))
    generates = answers(400, 408, 413, 429, 504, stream=True)
    reads = answers(400, 408, 413)

    @router.post(
        "/v1/completions", openapi_extra=body_schema(CompletionRequest), responses=generates
    )
    async def completions(request: Request) -> Response:
        model, ready = service.require_ready()
        service.admission.check(1, request.state.caller.tenant)
        body = await read_body(request, CompletionRequest, service.limits)
        service.require_model(body.model)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        caller = request.state.caller
        with _counting_refusals(service, caller):
            job = await prepare_completion(body, request_id, model, ready, service.limits, caller)
        return await _answer(service, request, "completion", request_id, body, job, model)

    @router.post(
        "/v1/chat/completions", openapi_extra=body_schema(ChatRequest), responses=generates
    )
    async def chat_completions(request: Request) -> Response:
        model, ready = service.require_ready()
        service.admission.check(1, request.state.caller.tenant)
        body = await read_body(request, ChatRequest, service.limits)
        service.require_model(body.model)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        caller = request.state.caller
        with _counting_refusals(service, caller):
            job = await prepare_chat(body, request_id, model, ready, service.limits, caller)
        return await _answer(service, request, "chat", request_id, body, job, model)

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.require_model(name)
        return json_response(_model_card(service))

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest), responses=reads)
    async def tokenize(request: Request) -> Response:
        model, ready = service.require_ready()
        body = await read_body(request, TokenizeRequest, service.limits)
        service.require_model(body.model)
        tokenizer = need_tokenizer(model, "prompt")
        text, special = body.prompt or "", body.add_special_tokens is not False
        if body.messages is not None:
            opens = body.add_generation_prompt is not False
            text, special = await render(model, body.messages, opens, False, {}), False
        refuse_surely_too_long(text, tokenizer, ready.max_model_len, "prompt")
        tokens = await asyncio.to_thread(tokenizer.encode, text, special)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": ready.max_model_len}
        return json_response(answer)

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest), responses=reads)
    async def detokenize(request: Request) -> Response:
        model, _ = service.require_ready()
        body = await read_body(request, DetokenizeRequest, service.limits)
        service.require_model(body.model)
        return json_response({"prompt": await asyncio.to_thread(_text, model, body.tokens)})

    return router


async def _answer(
    service: Service,
    request: Request,
    kind: Kind,
    request_id: str,
    body: GenerationRequest,
    job: Job,
    model: ServedModel,
) -> Response:
    """Run a prepared request and answer in the way it asked for."""
    state = request.state
    if state.client_id is None and body.request_id is not None and is_sane_id(body.request_id):
        state.request_id = body.request_id
    answer = Answer(kind, request_id, body, job, model, service, state.received_at)
    state.answer = answer  # for what is kept of it, see request_log.py
    if body.stream:
        return EventStream(answer.events(state))
    whole = await while_connected(request.receive, answer.whole())
    return Response(whole, media_type="application/json")


@contextmanager
def _counting_refusals(service: Service, caller: Caller) -> Iterator[None]:
    """Requests refused for their tenant's sake are counted by tenant."""
    try:
        yield
    except RequestError as error:
        if error.param == "priority":
            service.admission.rejections.count(caller.tenant, "priority")
        raise


def _model_card(service: Service) -> dict[str, Any]:
    model, ready = service.require_ready()
    return {
        "id": service.name,
        "object": "model",
        "created": model.created,
        "owned_by": "memd",
        "max_model_len": ready.max_model_len,
        "capabilities": {"prompt_cache": PROMPT_CACHE_FIELDS},
    }


def _text(model: ServedModel, tokens: list[int]) -> str:
    tokenizer = need_tokenizer(model, "tokens")
    for token_id in tokens:
        if token_id >= model.vocab_size:
            raise RequestError(
                f"tokens has the token id {token_id}, ids go from 0 to {model.vocab_size - 1}",
                "tokens",
            )
    pieces = (tokenizer.token_bytes(token_id, False) for token_id in tokens)
    return b"".join(pieces).decode("utf-8", "replace")
