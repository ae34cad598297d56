"""What a request says about the prompt cache, in OpenAI's fields. Unknown values are refused."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from memd.units import parse_duration

MAX_TTL_SECONDS = 24 * 3600.0
DEFAULT_TTL_SECONDS = 30 * 60.0
MAX_BREAKPOINTS = 4


def _ttl(value: object) -> float:
    try:
        seconds = parse_duration(value) if isinstance(value, str) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_TTL_SECONDS:
        raise ValueError("must be a duration of at most 24h, such as 30m")
    return seconds


class CacheFields(BaseModel):
    """The base of what the fields below are in."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class PromptCacheOptions(CacheFields):
    """How the prompt is kept. `implicit`: with a ttl, all of it; `explicit`: up to breakpoints."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[float, BeforeValidator(_ttl, json_schema_input_type=str)] | None = None


class PromptCacheRequest(CacheFields):
    """The fields that completions and chat completions have for the prompt cache."""

    prompt_cache_key: (
        Annotated[str, Field(max_length=256, description="Names what is pinned; isolates nothing")]
        | None
    ) = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def pin_seconds(self) -> float | None:
        """How long the prompt is to be pinned; None: nothing was asked for."""
        options = self.prompt_cache_options
        if options is not None and options.ttl is not None:
            return options.ttl
        return MAX_TTL_SECONDS if self.prompt_cache_retention == "24h" else None

    @property
    def pins_breakpoints_only(self) -> bool:
        """Whether a prompt without a breakpoint is not to be pinned."""
        options = self.prompt_cache_options
        return options is not None and options.mode == "explicit"


class Breakpoints(NamedTuple):
    """The prompt_cache_breakpoints in a message's content.

    `parts`: how many have one; `characters`: of text up to the end of the last of these.
    """

    parts: int
    characters: int


def breakpoints_in(content: Any) -> Breakpoints:
    """Find them in content as the client sent it.

    Raises:
        ValueError: a breakpoint is not `{"mode": "explicit"}`.
    """
    count = characters = end = 0
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        characters += len(part["text"]) if isinstance(part.get("text"), str) else 0
        mark = part.get("prompt_cache_breakpoint")
        if mark is None:
            continue
        if not isinstance(mark, dict) or mark.get("mode") != "explicit":
            raise ValueError('a prompt_cache_breakpoint must be {"mode": "explicit"}')
        count += 1
        end = characters
    return Breakpoints(count, end)
