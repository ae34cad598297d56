"""From what a request says about the prompt cache to what the engine is asked to pin."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence

from memd.api.schemas import ChatRequest, Message
from memd.api.schemas_cache import DEFAULT_TTL_SECONDS, PromptCacheRequest
from memd.engine.messages import PinWish
from memd.errors import RequestError

Render = Callable[[list[Message]], Awaitable[str]]
Encode = Callable[[str], Awaitable[list[int]]]


def pin_wish(
    body: PromptCacheRequest, prompt_tokens: int, breakpoint_tokens: int | None = None
) -> PinWish | None:
    """What of a prompt is to be pinned, if anything.

    Args:
        body: With the fields of the prompt cache.
        prompt_tokens: Length of the prompt.
        breakpoint_tokens: Up to its last breakpoint; None: it has none.
    """
    seconds = body.pin_seconds
    tokens = breakpoint_tokens
    if tokens is None:
        if seconds is None or body.pins_breakpoints_only:
            return None
        tokens = prompt_tokens
    return PinWish(tokens, seconds or DEFAULT_TTL_SECONDS, cache_label(body.prompt_cache_key))


def cache_label(key: str | None) -> str:
    """A prompt_cache_key as operators see it: what it says is the client's own business."""
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest() if key else ""


async def breakpoint_tokens(
    body: ChatRequest, text: str, tokens: Sequence[int], render: Render, encode: Encode
) -> int | None:
    """How many tokens of a chat's prompt lie before its last breakpoint.

    What the template makes of the messages up to there is compared with the whole prompt, as text
    and then as tokens, so the count is right whatever the template adds; it is 0 for a template
    that refuses messages that end there.

    Args:
        body: The chat.
        text: Its prompt.
        tokens: The same as ids.
        render: Makes the text of messages.
        encode: Makes ids of text.

    Returns:
        None: it has no breakpoint.
    """
    marked = [
        (index, message) for index, message in enumerate(body.messages) if message.breakpoints.parts
    ]
    if not marked:
        return None
    index, last = marked[-1]
    cut = last.model_copy(update={"content": (last.content or "")[: last.breakpoints.characters]})
    try:
        before = await render([*body.messages[:index], cut])
        ids = await encode(text[: _common(before, text)])
    except RequestError:
        return 0
    return _common(ids, tokens)


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common beginning."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))
