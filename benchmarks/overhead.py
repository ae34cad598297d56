"""What HTTP, text and SSE cost: streams through a daemon against the same work on a bare engine.

Both run the same prompts and settings, in turns, each waiting while the other works. The engine of
the bare side is driven in this process, through the messages that the daemon would send.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemon_process import serving
from streams import Target
from workload import Session, Shape, sessions

# As the daemon starts its engine; read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

SETTINGS = ("memory.limit=131072 tokens",)


class BareEngine:
    """An engine in this process.

    Args:
        model: What `model.path` takes.
        assignments: `key=value` settings.
    """

    def __init__(self, model: str, assignments: Sequence[str]) -> None:
        from memd.config import dump
        from memd.config_sources import load
        from memd.daemon import load_model
        from memd.engine.build import load_engine
        from memd.engine.messages import Start
        from memd.engine.port import InlinePort

        settings = load(assignments=(f"model.path={model}", *assignments), environment={})
        served, eos_token_ids = load_model(settings, "bench")
        if served.tokenizer is None:
            raise SystemExit(f"{model} has no tokenizer: the streams would carry no text")
        self._tokenizer = served.tokenizer
        self._port = InlinePort()
        start = Start(dump(settings), 1, served.vocab_size, eos_token_ids)
        self._engine, _ = load_engine(self._port, start)
        self._serial = 0

    def run(self, work: list[Session]) -> tuple[float, int]:
        """Seconds and generated tokens of all sessions, submitted at once."""
        from memd.engine.messages import SamplingParams, StepReport, Submit

        submits = []
        for session in work:
            self._serial += 1
            turn = session.turns[0]
            params = SamplingParams(1, turn.max_tokens, temperature=0.0, ignore_eos=True)
            tokens = self._tokenizer.encode(turn.text)
            submits.append(Submit(str(self._serial), tokens, params))
        self._port.take()
        started_at, generated = time.perf_counter(), 0
        self._port.post(*submits)
        unfinished = len(submits)
        while unfinished:
            self._engine.step()
            for message in self._port.take():
                for output in message.outputs if isinstance(message, StepReport) else ():
                    generated += len(output.token_ids)
                    unfinished -= output.finish_reason is not None
        return time.perf_counter() - started_at, generated


async def over_http(target: Target, model: str, work: list[Session]) -> tuple[float, int]:
    """Seconds and generated tokens of all sessions, sent at once. SystemExit: one failed."""
    started_at = time.perf_counter()
    answers = await asyncio.gather(
        *(
            target.stream(
                "/v1/completions",
                {
                    "model": model,
                    "prompt": session.turns[0].text,
                    "max_tokens": session.turns[0].max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
            for session in work
        )
    )
    ended_at = time.perf_counter()
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise SystemExit(f"{len(failures)} streams failed, the first one: {failures[0]}")
    return ended_at - started_at, sum(answer.completion_tokens or 0 for answer in answers)


def compare(
    model: str,
    streams: int,
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    assignments: Sequence[str] = (),
) -> dict[str, Any]:
    """Run both sides in turns.

    Args:
        model: What `model.path` takes.
        streams: At once.
        rounds: Of each side, after one that is not counted.
        prompt_tokens: Of each stream, about.
        output_tokens: Of each stream.
        assignments: `key=value` settings of both sides.

    Returns:
        Seconds of each round by side, and `cost`: the median share by which HTTP took longer.
    """
    settings = (*SETTINGS, *assignments)
    times: dict[str, list[float]] = {"engine": [], "http": []}
    generated = 0
    bare = BareEngine(model, settings)
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(Path(directory), model, *settings) as (url, _),
    ):
        target = Target(url)
        name = asyncio.run(target.get("/v1/models"))["data"][0]["id"]
        for number in range(rounds + 1):
            work = work_of(streams, prompt_tokens, output_tokens, seed=number)
            engine_seconds, generated = bare.run(work)
            http_seconds, streamed = asyncio.run(over_http(target, name, work))
            if streamed != generated:
                raise SystemExit(f"{streamed} tokens over HTTP, {generated} without")
            warm_up = "" if number else ", not counted"
            print(
                f"round {number} of {rounds}: {engine_seconds:.1f} s on the bare engine, "
                f"{http_seconds:.1f} s over HTTP{warm_up}",
                file=sys.stderr,
            )
            if number:
                times["engine"].append(engine_seconds)
                times["http"].append(http_seconds)
    pairs = zip(times["http"], times["engine"], strict=True)
    cost = statistics.median(http / engine - 1 for http, engine in pairs)
    return {"streams": streams, "output_tokens": generated, "seconds": times, "cost": cost}


def work_of(streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> list[Session]:
    """Prompts of one length that share nothing, with themselves or with another round's."""
    shape = Shape(
        mix="random",
        requests=streams,
        rate=float("inf"),
        burst=streams,
        duration_seconds=None,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        spread=0.0,
        turns=1,
        think_seconds=0.0,
        seed=seed,
    )
    return list(sessions(shape))


def describe(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['streams']} streams, {result['output_tokens']} tokens a round"]
    for side, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        lines.append(
            f"{side:<8} median {median:.3f} s, {result['output_tokens'] / median:.0f} tokens/s   "
            + " ".join(f"{each:.3f}" for each in seconds)
        )
    return "\n".join([*lines, f"HTTP and SSE cost {result['cost']:+.1%}"])
