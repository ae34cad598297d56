"""From a checked body to what the engine is asked: tokens, limits, sampling, Submits."""

import asyncio
import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from memd.api.auth import Caller
from memd.api.model import ServedModel, Tokenizer
from memd.api.prompt_pins import breakpoint_tokens, pin_wish
from memd.api.schemas import (
    INT64_MAX,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
)
from memd.config import ServerSettings
from memd.engine.messages import PinWish, Ready, SamplingParams, Submit
from memd.errors import RequestError

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_SEQUENCES = 2048  # of one request
_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Prompt:
    """One prompt as ids; `text` as the client wrote it, None when it sent ids."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True)
class Job:
    """A request ready to run.

    Args:
        prompts: In the client's order.
        submits: Prompt-major, `candidates` for each prompt.
        candidates: Sequences generated for each prompt: n, or best_of.
        n: Choices answered for each prompt.
        logprobs: Alternatives shown for each token; None: no logprobs at all.
        echo: The prompt is part of the answer.
    """

    prompts: list[Prompt]
    submits: list[Submit]
    candidates: int
    n: int
    logprobs: int | None
    echo: bool


async def prepare_completion(
    body: CompletionRequest,
    request_id: str,
    model: ServedModel,
    ready: Ready,
    limits: ServerSettings,
    caller: Caller,
) -> Job:
    """Check a completion against model, limits and what the caller may ask for.

    Raises:
        RequestError: naming the field, the value and the limit.
    """
    given = [body.prompt] if _is_one_prompt(body.prompt) else body.prompt
    _check_logprobs("logprobs", body.logprobs, limits)
    n = body.n or 1
    candidates = body.best_of or n
    _check_choices(candidates, "best_of" if body.best_of else "n", limits)
    if len(given) * candidates > MAX_SEQUENCES:
        raise RequestError(
            f"prompt has {len(given)} prompts of {candidates} choices each, the limit is "
            f"{MAX_SEQUENCES} in all",
            "prompt",
        )
    prompts = [await _prompt(each, model, ready) for each in given]
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in prompts:
        check_length(prompt.token_ids, max_tokens, ready, "prompt")
    sampled = body.logprobs
    if candidates > n and sampled is None:
        sampled = 0  # the best are chosen by their mean logprob
    echoed = body.logprobs if body.echo else None
    sampling = _sampling(body, model, max_tokens, sampled, echoed)
    pins = [pin_wish(body, len(prompt.token_ids)) for prompt in prompts]
    submits = _submits(body, request_id, caller, prompts, sampling, candidates, pins)
    return Job(prompts, submits, candidates, n, body.logprobs, bool(body.echo))


async def prepare_chat(
    body: ChatRequest,
    request_id: str,
    model: ServedModel,
    ready: Ready,
    limits: ServerSettings,
    caller: Caller,
) -> Job:
    """Like `prepare_completion`; the output of a chat may fill the room left.

    Raises:
        RequestError: naming the field, the value and the limit.
    """
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_logprobs("top_logprobs", logprobs, limits)
    n = body.n or 1
    _check_choices(n, "n", limits)
    continues = bool(body.continue_final_message)
    text = await render(
        model,
        body.messages,
        body.add_generation_prompt is not False and not continues,
        continues,
        body.chat_template_kwargs or {},
    )
    tokens = await _encode(text, model, ready, "messages", add_special_tokens=False)
    wanted = body.max_completion_tokens or body.max_tokens
    check_length(tokens, wanted or 1, ready, "messages")
    prompt = Prompt(tokens, text)
    max_tokens = wanted or ready.max_model_len - len(tokens)
    sampling = _sampling(body, model, max_tokens, logprobs, None)
    variables = body.chat_template_kwargs or {}
    marked = await breakpoint_tokens(
        body,
        text,
        tokens,
        lambda messages: render(model, messages, False, False, variables),
        lambda part: _encode(part, model, ready, "messages", add_special_tokens=False),
    )
    pins = [pin_wish(body, len(tokens), marked)]
    submits = _submits(body, request_id, caller, [prompt], sampling, n, pins)
    return Job([prompt], submits, n, n, logprobs, False)


async def render(
    model: ServedModel,
    messages: list[Message],
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: dict[str, Any],
) -> str:
    """The prompt text of a chat, made in a worker thread.

    Raises:
        RequestError: the model has no chat template, or the template refuses the messages.
    """
    template = model.template
    if template is None or model.tokenizer is None:
        raise RequestError(
            f"the model {model.name} has no chat template: use completions", "messages"
        )

    def rendered() -> str:
        plain = [message.model_dump(exclude_none=True) for message in messages]
        return template.render(plain, add_generation_prompt, continue_final_message, variables)

    return await asyncio.to_thread(rendered)


def check_length(token_ids: list[int], max_tokens: int, ready: Ready, param: str) -> None:
    """Refuse what can never run.

    Raises:
        RequestError: with the numbers, code `context_length_exceeded`.
    """
    length, limit = len(token_ids), ready.max_model_len
    if length == 0:
        raise RequestError(f"{param} is empty: it must hold at least one token", param)
    page_tokens, capacity = ready.pool["page_tokens"], ready.pool["capacity_pages"]
    pages = -(-length // page_tokens)
    maximum = f"This model's maximum context length is {limit} tokens"
    if pages > capacity:
        raise RequestError(
            f"{maximum}, and the prompt of {length} tokens needs {pages} pages of {page_tokens} "
            f"tokens, the pool holds {capacity}",
            param,
            _TOO_LONG,
        )
    if length + max_tokens > limit:
        raise RequestError(
            f"{maximum}. However, you requested {length + max_tokens} tokens ({length} in the "
            f"prompt, {max_tokens} for the output).",
            param if length >= limit else "max_tokens",
            _TOO_LONG,
        )


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for 0, else a hash of both, 0 to 2**63 - 1."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") & INT64_MAX


def _is_one_prompt(prompt: str | list[Any]) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], int)


async def encode_prompt(
    given: str | list[int], model: ServedModel, ready: Ready, param: str = "prompt"
) -> list[int]:
    """The ids of a prompt, made in a worker thread. Raises RequestError."""
    if isinstance(given, str):
        return await _encode(given, model, ready, param)
    return _checked_ids(given, model.vocab_size, param)


async def _prompt(given: str | list[int], model: ServedModel, ready: Ready) -> Prompt:
    text = given if isinstance(given, str) else None
    return Prompt(await encode_prompt(given, model, ready), text)


async def _encode(
    text: str, model: ServedModel, ready: Ready, param: str, add_special_tokens: bool = True
) -> list[int]:
    tokenizer = need_tokenizer(model, param)
    refuse_surely_too_long(text, tokenizer, ready.max_model_len, param)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


def need_tokenizer(model: ServedModel, param: str) -> Tokenizer:
    """The model's tokenizer. Raises RequestError when it has none."""
    if model.tokenizer is None:
        raise RequestError(
            f"the model {model.name} has no tokenizer: {param} must be token ids", param
        )
    return model.tokenizer


def refuse_surely_too_long(text: str, tokenizer: Tokenizer, limit: int, param: str) -> None:
    """Spare the tokenizer a text that cannot fit, however it is cut into tokens.

    Raises:
        RequestError: code `context_length_exceeded`.
    """
    size_bytes, longest = len(text.encode()), tokenizer.max_token_bytes
    if size_bytes > limit * longest:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, your text of "
            f"{size_bytes} bytes has at least {-(-size_bytes // longest)} tokens.",
            param,
            _TOO_LONG,
        )


def _checked_ids(token_ids: list[int], vocab_size: int, param: str) -> list[int]:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(each for each in token_ids if not 0 <= each < vocab_size)
        raise RequestError(
            f"{param} has the token id {wrong}, ids go from 0 to {vocab_size - 1}", param
        )
    return token_ids


def _check_logprobs(param: str, value: int | None, limits: ServerSettings) -> None:
    if value is not None and value > limits.max_logprobs:
        raise RequestError(f"{param} is {value}, the limit is {limits.max_logprobs}", param)


def _check_choices(value: int, param: str, limits: ServerSettings) -> None:
    if value > limits.max_choices:
        raise RequestError(f"{param} is {value}, the limit is {limits.max_choices}", param)


def _sampling(
    body: GenerationRequest,
    model: ServedModel,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """How the request samples, with its own seed or a new one."""
    stop_token_ids = _checked_ids(body.stop_token_ids or [], model.vocab_size, "stop_token_ids")
    _checked_ids(list(body.logit_bias), model.vocab_size, "logit_bias")
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {min_tokens}, the limit is max_tokens, which is {max_tokens}",
            "min_tokens",
        )
    greedy = body.top_p == 0
    top_k = body.top_k or 0
    return SamplingParams(
        seed=body.seed if body.seed is not None and body.seed >= 0 else secrets.randbits(63),
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if greedy or body.top_p is None else body.top_p,
        top_k=top_k if 0 < top_k <= model.vocab_size else 0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.logit_bias,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _priority(wanted: int | None, caller: Caller) -> int:
    """What was asked for, else what is nearest to 0 of what the caller may have."""
    lowest, highest = caller.priority or (wanted or 0, wanted or 0)
    if wanted is None:
        return min(max(0, lowest), highest)
    if not lowest <= wanted <= highest:
        raise RequestError(
            f"priority is {wanted}, the API key {caller.name} allows {lowest} to {highest}",
            "priority",
        )
    return wanted


def _submits(
    body: GenerationRequest,
    request_id: str,
    caller: Caller,
    prompts: list[Prompt],
    sampling: SamplingParams,
    candidates: int,
    pins: list[PinWish | None],
) -> list[Submit]:
    priority = _priority(body.priority, caller)
    seeds = [derive_seed(sampling.seed, index) for index in range(candidates)]
    return [
        Submit(
            request_id=f"{request_id}-{at * candidates + index}",
            prompt_tokens=prompt.token_ids,
            sampling=msgspec.structs.replace(sampling, seed=seed),
            salt=caller.salt(body.cache_salt),
            priority=priority,
            tenant=caller.tenant,
            pin=pins[at] if index == 0 else None,  # the choices of a prompt share its pages
        )
        for at, prompt in enumerate(prompts)
        for index, seed in enumerate(seeds)
    ]
