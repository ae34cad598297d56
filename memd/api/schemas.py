"""Request bodies, as OpenAI defines them plus memd's extensions. Unknown fields are ignored.

Types are strict: a number in quotes or a bool for a number is an error, never a guess. Limits that
depend on settings or on the model are checked in `memd.api.prepare`. An array is checked up to its
first fault (fail_fast): an error for each of millions would hold the GIL for seconds.
"""

from http import HTTPStatus
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from memd.api.schemas_cache import MAX_BREAKPOINTS, Breakpoints, PromptCacheRequest, breakpoints_in

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
INT64_MAX = 2**63 - 1


def refuse(param: str, message: str, code: str = "") -> NoReturn:
    """End validation with a RequestError of this content (see memd.api.body)."""
    raise PydanticCustomError(
        "request_error", "{message}", {"message": message, "param": param, "code": code}
    )


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        refuse(param, f"{param} must be a string, not {type(value).__name__}")
    if "\0" in value:
        refuse(param, f"{param} contains the character U+0000")
    return value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompt(value: object) -> Any:
    if isinstance(value, str):
        return _text(value, "prompt")
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
        if _is_ids(value) or all(_is_ids(item) for item in value):
            return value
    if value == []:
        refuse("prompt", "prompt is empty: it must hold at least one token")
    refuse(
        "prompt", "prompt must be a string, an array of strings, token ids or arrays of token ids"
    )


def _stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        refuse("stop", "stop must be a string or an array of strings")
    if len(stops) > MAX_STOPS:
        refuse("stop", f"stop has {len(stops)} strings, the limit is {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            refuse(
                "stop",
                f"stop has a string of {len(stop)} characters; each must have 1 to "
                f"{MAX_STOP_CHARACTERS}",
            )
    return stops


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("logit_bias", "logit_bias must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            refuse("logit_bias", f"logit_bias has the key {key[:40]!r}, which is no token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            refuse("logit_bias", f"logit_bias[{key}] must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _content(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("messages", "a message's content must be a string or an array of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_image", "image", "input_audio", "file"):
            refuse(
                "messages", f"content parts of type {kind!r} are refused: the model reads text only"
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            refuse(
                "messages", "each part of a message's content must be {type: text, text: string}"
            )
        texts.append(part["text"])
    return "".join(texts)


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """`include_usage` adds one last chunk with the usage."""

    include_usage: bool | None = None


class GenerationRequest(PromptCacheRequest):
    """What completions and chat completions have in common."""

    model: str = Field(description="A served model, see GET /v1/models")
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, description="0: greedy")] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[
        dict[int, float],
        PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None),
    ] = Field(default_factory=dict)
    seed: (
        Annotated[int, Field(ge=-1, le=INT64_MAX, description="-1 or null: a random one")] | None
    ) = None
    stop: Annotated[
        list[str], PlainValidator(_stop, json_schema_input_type=str | list[str] | None)
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: (
        Annotated[int, Field(ge=-(2**31), lt=2**31, description="Lower first; 0 is usual")] | None
    ) = None
    cache_salt: Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")] | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None
    session_id: Annotated[str, Field(max_length=128)] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _unsupported(cls, data: Any) -> Any:
        """Known fields that would change the answer and cannot be honoured are refused."""
        for name in ("suffix", "audio", "tools", "functions"):
            if data.get(name):
                refuse(name, f"{name} is not supported yet", "unsupported")
        if data.get("modalities") not in (None, [], ["text"]):
            refuse("modalities", 'modalities other than ["text"] are not supported', "unsupported")
        if data.get("tool_choice") not in (None, "none", "auto"):
            refuse("tool_choice", "tool_choice is not supported yet", "unsupported")
        if data.get("function_call") not in (None, "none", "auto"):
            refuse("function_call", "function_call is not supported yet", "unsupported")
        form = data.get("response_format")
        if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
            kind = form.get("type") if isinstance(form, dict) else None
            if kind in ("json_object", "json_schema"):
                refuse(
                    "response_format", f"response_format {kind} is not supported yet", "unsupported"
                )
            refuse("response_format", "response_format must be an object with the type text")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options is only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Any,
        PlainValidator(
            _prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _choices(self) -> "CompletionRequest":
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            refuse("best_of", f"best_of is {self.best_of}, it must be at least n, which is {n}")
        if self.best_of is not None and self.best_of > n and self.stream:
            refuse("best_of", f"best_of {self.best_of} with n {n} cannot be streamed")
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "max_tokens 0 is only allowed with echo: true")
        return self


class Message(_Body):
    """One message; further fields reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None),
    ] = None
    name: str | None = None
    _breakpoints: Breakpoints = PrivateAttr(Breakpoints(0, 0))

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, data: Any, handler: ModelWrapValidatorHandler["Message"]) -> "Message":
        message = handler(data)
        content = data.get("content") if isinstance(data, dict) else None
        try:
            message._breakpoints = breakpoints_in(content)
        except ValueError as error:
            refuse("messages", str(error))
        return message

    @property
    def breakpoints(self) -> Breakpoints:
        """Where its content is marked."""
        return self._breakpoints

    @model_validator(mode="after")
    def _complete(self) -> "Message":
        if self.content is None and self.role != "assistant":
            refuse("messages", f"a message of role {self.role} has no content")
        if self.content is not None:
            _text(self.content, "messages")
        return self


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _chat(self) -> "ChatRequest":
        marks = sum(message.breakpoints.parts for message in self.messages)
        if marks > MAX_BREAKPOINTS:
            refuse(
                "messages",
                f"messages have {marks} prompt_cache_breakpoints, the limit is {MAX_BREAKPOINTS}",
            )
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "top_logprobs is only allowed with logprobs: true")
        if self.continue_final_message:
            if self.messages[-1].role != "assistant":
                refuse(
                    "continue_final_message",
                    "continue_final_message needs a last message of role assistant, "
                    f"not {self.messages[-1].role}",
                )
            if self.add_generation_prompt:
                refuse(
                    "add_generation_prompt",
                    "add_generation_prompt and continue_final_message exclude each other",
                )
        return self


class TokenizeRequest(_Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class ErrorDetail(BaseModel):
    """What is wrong: in words, by kind, and where."""

    message: str
    type: str
    param: str | None = Field(description="The field at fault")
    code: str | None = Field(description="Machine-readable")


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    error: ErrorDetail


def answers(*statuses: int, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entry of a route's answers besides its JSON.

    Args:
        statuses: Errors it may give, each with an ErrorBody.
        stream: Whether 200 may be an event stream.
    """
    documented: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
        for status in statuses
    }
    if stream:
        documented[200] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
    return documented


SCHEMAS = (
    CompletionRequest,
    ChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
