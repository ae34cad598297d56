"""Running a prepared request: outputs of the engine become one JSON answer, or a stream of events.

What all events of a stream have in common is encoded once; the rest are plain dicts.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from starlette.datastructures import State

from memd.api.choice import Choice, Delta, Entry, TextOptions
from memd.api.errors import ApiError, error_body
from memd.api.model import ServedModel
from memd.api.outputs import Outputs
from memd.api.prepare import Job
from memd.api.schemas import GenerationRequest
from memd.api.service import Service
from memd.engine.messages import Output

PING_SECONDS = 15.0
_OUTCOMES = {"cancelled": "cancelled", "timeout": "timeout", "slow_reader": "timeout"}  # by code
_DONE = b"data: [DONE]\n\n"
_OBJECTS = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completion": ("text_completion", "text_completion"),
}
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)

Kind = Literal["chat", "completion"]


class Answer:
    """One request being answered.

    Args:
        kind: Which of OpenAI's two shapes the answer has.
        request_id: Names the answer; the submits of `job` carry it too.
        body: What the client asked for.
        job: The same, prepared.
        model: The served model.
        service: Engine and metrics.
        received_at: When the request arrived, monotonic seconds.
    """

    def __init__(
        self,
        kind: Kind,
        request_id: str,
        body: GenerationRequest,
        job: Job,
        model: ServedModel,
        service: Service,
        received_at: float,
    ) -> None:
        self._kind = kind
        self._job = job
        self._body = body
        self._engine = service.engine
        self._metrics = service.metrics
        self._admission = service.admission
        self._limit_seconds = service.limits.generation_timeout
        self._received_at = received_at
        self._head = {
            "id": request_id,
            "object": _OBJECTS[kind][bool(body.stream)],
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        self._prefix = b"data: " + _encode(self._head)[:-1] + b',"choices":'
        options = TextOptions(
            model.tokenizer,
            body.stop,
            bool(body.include_stop_str_in_output),
            body.skip_special_tokens is not False,
        )
        self._choices = {
            submit.request_id: Choice(
                index, job.prompts[index // job.candidates], submit.sampling, job, options
            )
            for index, submit in enumerate(job.submits)
        }
        self._unfinished = len(self._choices)

    async def whole(self) -> bytes:
        """Run to the end and give the JSON body.

        Raises:
            ApiError: the request was not let in, took too long, or ended with an error.
        """
        self._admission.check(len(self._job.submits), self._job.submits[0].tenant)
        with self._engine.generate(self._job.submits) as outputs:
            while self._unfinished:
                output = await self._next(outputs)
                if output is not None:
                    self._take(output, outputs)
        choices = [self._whole_choice(*numbered) for numbered in enumerate(self._best())]
        return _encode({**self._head, "choices": choices, "usage": self._usage()})

    async def events(self, state: State) -> AsyncGenerator[bytes]:
        """Server-sent events, from the first output on; a comment after each silence.

        Args:
            state: Of the HTTP request; `outcome` is set where the status does not tell it.

        Raises:
            ApiError: an error before the first event. A later one becomes an event of the stream.
        """
        started = False
        self._admission.check(len(self._job.submits), self._job.submits[0].tenant)
        with self._engine.generate(self._job.submits) as outputs:
            try:
                while self._unfinished:
                    output = await self._next(outputs)
                    delta = None if output is None else self._take(output, outputs)
                    if not started:
                        started = True
                        yield self._opening()
                    if output is None or delta is None:
                        yield b": ping\n\n"
                    elif (chunk := self._chunk_choice(output.request_id, delta)) is not None:
                        yield self._event([chunk])
            except ApiError as error:
                if not started:
                    raise
                state.outcome = _OUTCOMES.get(error.code or "", "error")
                yield self._error_event(error)
                return
            except Exception:
                _log.exception("request %s failed", self._head["id"])
                if not started:
                    raise
                state.outcome = "error"
                yield self._error_event(ApiError(500, "internal error", "internal_error"))
                return
        if self._body.include_usage:
            yield self._event([], self._usage())
        yield _DONE

    async def _next(self, outputs: Outputs) -> Output | None:
        """The next output, or None after a silence. Raises ApiError 504 when time is up."""
        limit = math.inf if self._limit_seconds is None else self._limit_seconds
        left = self._received_at + limit - time.monotonic()
        if left > 0:
            try:
                return await outputs.next(min(PING_SECONDS, left))
            except TimeoutError:
                if left > PING_SECONDS:
                    return None
        message = f"the request was not finished in {limit:g} s"
        raise ApiError(504, message, "timeout", headers={"x-should-retry": "false"})

    def _take(self, output: Output, outputs: Outputs) -> Delta:
        choice = self._choices[output.request_id]
        if choice.finish_reason is not None:  # arrived before its stop string was seen
            return Delta("", [], [], None)
        delta = choice.take(output)
        if delta.token_ids:
            self._observe_tokens(choice)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._observe_end(choice)
            if output.finish_reason is None:
                outputs.stop(output.request_id)
        return delta

    def _observe_tokens(self, choice: Choice) -> None:
        now = time.monotonic()
        if choice.first_token_at is None:
            choice.first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._received_at)
        else:
            self._metrics.inter_token_latency.observe(now - choice.last_token_at)
        choice.last_token_at = now

    def _observe_end(self, choice: Choice) -> None:
        count = len(choice.token_ids)
        self._metrics.request_generated_tokens.observe(count)
        if choice.index % self._job.candidates == 0:
            self._metrics.request_prompt_tokens.observe(len(choice.prompt.token_ids))
        if count > 1 and choice.first_token_at is not None:
            took = choice.last_token_at - choice.first_token_at
            self._metrics.time_per_output_token.observe(took / (count - 1))

    def _best(self) -> list[Choice]:
        """The choices answered: of each prompt's candidates the n with the best mean logprob."""
        every = list(self._choices.values())
        candidates, n = self._job.candidates, self._job.n
        if candidates == n:
            return every
        kept = []
        for start in range(0, len(every), candidates):
            group = every[start : start + candidates]
            kept += sorted(group, key=lambda choice: choice.score, reverse=True)[:n]
        return kept

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        answer: dict[str, Any] = {"index": index}
        if self._kind == "chat":
            answer["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            answer["text"] = choice.text
        answer["logprobs"] = self._logprobs(choice, choice.entries)
        answer["finish_reason"] = choice.finish_reason
        if self._body.return_token_ids:
            answer["token_ids"] = choice.token_ids
            answer["prompt_token_ids"] = choice.prompt.token_ids
        return answer

    def _chunk_choice(self, key: str, delta: Delta) -> dict[str, Any] | None:
        """The choice of a chunk, or None when the client would learn nothing from it."""
        ids = self._body.return_token_ids and delta.token_ids
        if not (delta.text or delta.entries or delta.finish_reason or ids):
            return None
        choice = self._choices[key]
        answer: dict[str, Any] = {"index": choice.index}
        if self._kind == "chat":
            answer["delta"] = (
                {"content": delta.text} if delta.text or not delta.finish_reason else {}
            )
        else:
            answer["text"] = delta.text
        answer["logprobs"] = self._logprobs(choice, delta.entries) if delta.entries else None
        answer["finish_reason"] = delta.finish_reason
        if self._body.return_token_ids:
            answer["token_ids"] = delta.token_ids
        return answer

    def _logprobs(self, choice: Choice, entries: list[Entry]) -> dict[str, Any] | None:
        if self._job.logprobs is None:
            return None
        names = choice.names
        return names.chat(entries) if self._kind == "chat" else names.completion(entries)

    def _opening(self) -> bytes:
        """A chat begins with the role of each choice; a completion needs nothing."""
        ids = self._body.return_token_ids
        opening: list[dict[str, Any]] = []
        for choice in self._choices.values():
            if self._kind == "chat":
                first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
            elif ids:
                first = {"text": ""}
            else:
                continue
            if ids:
                first["prompt_token_ids"] = choice.prompt.token_ids
            opening.append(
                {"index": choice.index, **first, "logprobs": None, "finish_reason": None}
            )
        return b"".join(self._event([choice]) for choice in opening)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        tail = b',"usage":' + _encode(usage) if self._body.include_usage else b""
        return self._prefix + _encode(choices) + tail + b"}\n\n"

    def _error_event(self, error: ApiError) -> bytes:
        body = error_body(error.message, error.status, error.code, error.param)
        return b"data: " + _encode(body) + b"\n\n" + _DONE

    def record(self) -> dict[str, Any]:
        """Columns of the table `requests`, as far as it has come. None: not known."""
        choices = list(self._choices.values())
        reasons = sorted({choice.finish_reason for choice in choices if choice.finish_reason})
        started = any(choice.cached_tokens is not None for choice in choices)
        queued = [each.queue_seconds for each in choices if each.queue_seconds is not None]
        firsts = [each.first_token_at for each in choices if each.first_token_at is not None]
        usages = [each.usage for each in choices if each.usage is not None]
        told = len(usages) == len(choices)
        usage = self._usage()
        cached = usage["memd"]["cached_tokens_by_tier"]
        missed = max((each.missed for each in choices if each.missed), default=None)
        return {
            "request_id": self._head["id"],
            # Of its sequence that missed most: those of one prompt find what the first computes.
            "missed_tokens": (missed.tokens if missed else 0) if started else None,
            "missed_evicted_tokens": (missed.evicted_tokens if missed else 0) if started else None,
            "first_missing_token": missed.first_token if missed else None,
            "miss_reason": missed.reason if missed else None,
            "finish_reason": ",".join(reasons) or None,
            "priority": self._job.submits[0].priority,
            "sequences": len(choices),
            "prompt_tokens": usage["prompt_tokens"],
            "generated_tokens": usage["completion_tokens"],
            "cached_device_tokens": cached["device"] if started else None,
            "cached_host_tokens": cached["host"] if started else None,
            "peak_pages": sum(each.peak_pages for each in usages) if told else None,
            "preemptions": sum(each.preemptions for each in usages) if told else None,
            "queue_seconds": max(queued, default=None),
            "stall_seconds": max(each.stall_seconds for each in usages) if told else None,
            "time_to_first_token_seconds": min(firsts) - self._received_at if firsts else None,
        }

    def _usage(self) -> dict[str, Any]:
        """Prompt tokens count once a prompt; cached ones as far as all its choices had them."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._job.prompts)
        choices = list(self._choices.values())
        completion_tokens = sum(len(choice.token_ids) for choice in choices)
        cached = 0
        tiers = {"device": 0, "host": 0, "disk": 0}
        for start in range(0, len(choices), self._job.candidates):
            group = choices[start : start + self._job.candidates]
            least = min(group, key=lambda choice: choice.cached_tokens or 0)
            cached += least.cached_tokens or 0
            tiers["device"] += (least.cached_tokens or 0) - sum(least.restored_tokens.values())
            for tier, count in least.restored_tokens.items():
                tiers[tier] += count
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "memd": {
                "cached_tokens_by_tier": tiers,
                "pinned_tokens": sum(choice.pinned_tokens for choice in choices),
            },
        }
