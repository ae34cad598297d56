"""One sequence's answer as it grows: tokens become text, stops and logprob entries."""

import codecs
from dataclasses import dataclass
from typing import Any

from memd.api.detokenizer import Detokenizer
from memd.api.errors import ApiError
from memd.api.model import Tokenizer
from memd.api.prepare import Job, Prompt
from memd.engine.messages import Output, SamplingParams, SequenceUsage, TokenLogprobs
from memd.types import PrefixMiss

_STATUS = {"context_length_exceeded": 400, "slow_reader": 408} | dict.fromkeys(
    ("cancelled", "draining", "engine_failed", "pool_exhausted"), 503
)

Entry = tuple[
    int, TokenLogprobs | None
]  # token id and its logprobs; None: the first prompt token's


@dataclass
class Delta:
    """What one output added. `entries` are there only when logprobs were asked for."""

    text: str
    token_ids: list[int]
    entries: list[Entry]
    finish_reason: str | None


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text, the same for all choices of a request."""

    tokenizer: Tokenizer | None
    stops: list[str]
    include_stop: bool
    skip_special: bool


class Choice:
    """One sequence of a request.

    Args:
        index: Among the choices answered.
        prompt: What it continues.
        sampling: As submitted.
        job: The request.
        options: How tokens become text.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        sampling: SamplingParams,
        job: Job,
        options: TextOptions,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.text = ""
        self.token_ids: list[int] = []
        self.entries: list[Entry] = []
        self.finish_reason: str | None = None
        self.cached_tokens: int | None = None
        self.restored_tokens: dict[str, int] = {}  # of the cached ones: from lower tiers
        self.pinned_tokens = 0
        self.queue_seconds: float | None = None
        self.missed: PrefixMiss | None = None
        self.usage: SequenceUsage | None = None  # None: it goes on, or ended here
        self.logprob_sum = 0.0
        self.names = TokenNames(options)
        self.first_token_at: float | None = None  # monotonic seconds
        self.last_token_at = 0.0
        self._sampling = sampling
        self._job = job
        self._options = options
        self._detokenizer = Detokenizer(options.stops, options.include_stop)
        self._opened = False

    @property
    def score(self) -> float:
        """Mean logprob of the tokens; the higher the better."""
        return self.logprob_sum / max(1, len(self.token_ids))

    def take(self, output: Output) -> Delta:
        """Add an output. A stop string ends the choice; tokens after it are dropped.

        Raises:
            ApiError: the engine ended the sequence with an error.
        """
        if output.usage is not None:
            self.usage = output.usage
        if output.finish_reason in ("error", "abort"):
            code = output.error_code or "internal_error"
            message = output.error or "the request was aborted"
            raise ApiError(_STATUS.get(code, 500), message, code)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
            self.restored_tokens = output.restored_tokens or {}
            self.pinned_tokens = output.pinned_tokens or 0
            self.queue_seconds = output.queue_seconds
            self.missed = output.missed
        delta = Delta("", [], [], None)
        if not self._opened:
            self._opened = True
            self._echo(output, delta)
        self._take_tokens(output, delta)
        self.text += delta.text
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason
        return delta

    def _echo(self, output: Output, delta: Delta) -> None:
        if not self._job.echo:
            return
        delta.text = self.prompt.text if self.prompt.text is not None else self._prompt_text()
        if self._job.logprobs is not None and output.prompt_logprobs is not None:
            delta.entries = list(zip(self.prompt.token_ids, output.prompt_logprobs, strict=True))

    def _prompt_text(self) -> str:
        return b"".join(map(self._bytes, self.prompt.token_ids)).decode("utf-8", "replace")

    def _take_tokens(self, output: Output, delta: Delta) -> None:
        pieces = [delta.text]
        last = len(output.token_ids) - 1
        for at, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            if output.logprobs is not None:
                self.logprob_sum += output.logprobs[at].logprob
                if self._job.logprobs is not None:
                    delta.entries.append((token_id, output.logprobs[at]))
            if at == last and output.finish_reason == "stop" and not self._options.include_stop:
                break  # the token that ended the sequence is no part of its text
            may_stop = len(self.token_ids) >= self._sampling.min_tokens
            text, stopped = self._detokenizer.push(self._bytes(token_id), may_stop)
            pieces.append(text)
            if stopped:
                delta.finish_reason = "stop"
                break
        if delta.finish_reason is None and output.finish_reason is not None:
            pieces.append(self._detokenizer.flush())
            delta.finish_reason = output.finish_reason
        delta.text = "".join(pieces)

    def _bytes(self, token_id: int) -> bytes:
        tokenizer = self._options.tokenizer
        return tokenizer.token_bytes(token_id, self._options.skip_special) if tokenizer else b""


class TokenNames:
    """How single tokens are shown in logprobs.

    Args:
        options: How tokens become text.
    """

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def raw(self, token_id: int) -> bytes | None:
        """Bytes of the token in the text; None without a tokenizer."""
        tokenizer = self._options.tokenizer
        return tokenizer.token_bytes(token_id, self._options.skip_special) if tokenizer else None

    def name(self, token_id: int) -> str:
        """Its text; `bytes:\\xf0\\x9f` when it is part of a character, as OpenAI shows it."""
        tokenizer = self._options.tokenizer
        if tokenizer is None:
            return f"token_id:{token_id}"
        raw = tokenizer.token_bytes(token_id, self._options.skip_special)
        if not raw:
            return tokenizer.token_text(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, entries: list[Entry]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        content = []
        for token_id, logprobs in entries:
            assert logprobs is not None  # generated tokens always have them
            top = [self._chat_token(other, value) for other, value in logprobs.top]
            content.append({**self._chat_token(token_id, logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.raw(token_id)
        return {
            "token": self.name(token_id),
            "logprob": _finite(logprob),
            "bytes": None if raw is None else list(raw),
        }

    def completion(self, entries: list[Entry]) -> dict[str, Any]:
        """`logprobs` of a completion choice; offsets go on from the previous call."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, logprobs in entries:
            tokens.append(self.name(token_id))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self.raw(token_id) or b""))
            if logprobs is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_finite(logprobs.logprob))
            pairs = [*logprobs.top, (token_id, logprobs.logprob)]
            tops.append({self.name(other): _finite(value) for other, value in pairs})
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON has no -inf; OpenAI shows -9999."""
    return max(logprob, -9999.0)
