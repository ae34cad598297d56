"""`memd generate` and `memd chat`: text from a running daemon, as it comes."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memd.cli.common import DEFAULT_URL, Format, FormatOption, UrlOption, connect, emit, say
from memd.errors import MemdError

if TYPE_CHECKING:
    from memd.client import Client

MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens made.")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", help="0: greedy.")]
TopPOption = Annotated[float | None, typer.Option("--top-p")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text to end before.")] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Continue a text."""
    body = _body(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    with connect(url) as client:
        body["model"] = _model(client)
        body["prompt"] = sys.stdin.read() if prompt == "-" else prompt
        if fmt is Format.JSON:
            emit(client.complete(body), fmt, lambda: None)
            return
        meter = Meter()
        try:
            for chunk in meter.watch(client.stream_complete(body)):
                for choice in chunk["choices"]:
                    _write(choice["text"])
        finally:
            _write("\n")
    say(meter.summary())


def chat(
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Talk with the model. /reset forgets the conversation, /quit or end of input leaves."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  line editing and history for input()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    settings = _body(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with connect(url) as client:
        settings["model"] = _model(client)
        for line in _lines(interactive):
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            question = {"role": "user", "content": line}
            try:
                answer = _answer(client, {**settings, "messages": [*messages, question]})
            except MemdError as error:
                if not interactive:
                    raise
                say(f"memd: {error}")
                continue
            messages += [question, {"role": "assistant", "content": answer}]


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line, without the empty ones."""
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                _write("\n")
            return
        if line.strip():
            yield line.strip()


def _answer(client: "Client", body: dict[str, Any]) -> str:
    """Stream one answer to stdout and return it; an interrupt ends the answer, not the chat."""
    meter = Meter()
    parts: list[str] = []
    chunks = client.stream_chat(body)
    try:
        for chunk in meter.watch(chunks):
            for choice in chunk["choices"]:
                part = choice["delta"].get("content") or ""
                parts.append(part)
                _write(part)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        _write("\n")
    say(meter.summary())
    return "".join(parts)


class Meter:
    """Counts and times the tokens of one stream."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._usage: dict[str, Any] | None = None

    def watch(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass chunks on; hang up when the reader stops."""
        try:
            for chunk in chunks:
                if any(_text(choice) for choice in chunk["choices"]):
                    self._last = time.monotonic()
                    self._first = self._first or self._last
                self._usage = chunk.get("usage") or self._usage
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator

    def summary(self) -> str:
        """Tokens, rate and reuse; `stopped` when the stream did not end by itself."""
        if self._usage is None:
            return "[stopped]"
        tokens, prompt = self._usage["completion_tokens"], self._usage["prompt_tokens"]
        cached = self._usage["prompt_tokens_details"]["cached_tokens"]
        parts = [f"{tokens} tokens"]
        if self._first is not None and self._last is not None:
            if tokens > 1 and self._last > self._first:
                parts.append(f"{(tokens - 1) / (self._last - self._first):.1f} tokens/s")
            parts.append(f"first after {self._first - self._started:.2f} s")
        return f"[{', '.join(parts)}; {cached} of {prompt} prompt tokens cached]"


def _text(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text


def _body(**fields: object) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def _model(client: "Client") -> str:
    return str(client.models()["data"][0]["id"])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
