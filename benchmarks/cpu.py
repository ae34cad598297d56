"""Prefill and decoding on this CPU beside transformers, same weights and dtype, in turns.

    python benchmarks/cpu.py [--context 512] [--steps 32] [--rounds 5] [--dtype float32]

memd is the inline engine: scheduler, pool, sampling and all, without the HTTP server. transformers
is its Llama with SDPA attention and its default cache, one forward call a step and an argmax, which
is less than what its `generate` does. Both continue the same prompts. With `llama-cpp-python`
installed, llama.cpp runs beside them on the GGUF file as it is, so with quantised weights. Figures
are medians over rounds, in tokens per second; the ratio is the median of each round's.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from typing import Any, Protocol

# As the daemon starts its engine; read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch

from memd.config import dump
from memd.config_sources import load
from memd.engine.build import load_engine
from memd.engine.messages import Abort, SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.hub import read_config, resolve

BATCHES = (1, 8)
LEAD_TOKENS = 1024  # that the first sequence may be ahead of the last, at most


class Contender(Protocol):
    """Something that continues prompts greedily."""

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        """Seconds until the first token of every prompt is there, and of each step after it."""


class Memd:
    """The engine in this process."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        settings = load(
            assignments=[
                f"model.path={model}",
                f"model.dtype={dtype}",
                f"engine.threads={threads}",
                "memory.limit=16384 tokens",
                "memory.host.limit=0",
            ],
            environment={},
        )
        self._port = InlinePort()
        vocab_size = read_config(resolve(model)).vocab_size
        self._engine, _ = load_engine(self._port, Start(dump(settings), 1, vocab_size, []))
        self._serial = 0

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        # Until they are aborted: prompts are computed one after the other, and the first sequence
        # must not end before the last has begun.
        sampling = SamplingParams(0, steps + LEAD_TOKENS, temperature=0.0, ignore_eos=True)
        waiting = set()
        for prompt in prompts:
            self._serial += 1
            waiting.add(str(self._serial))
            self._port.post(Submit(str(self._serial), prompt, sampling, salt=str(self._serial)))
        requests, started_at = frozenset(waiting), time.perf_counter()
        while waiting:
            waiting -= self._step()
        prefill = time.perf_counter() - started_at
        seconds = []
        for _ in range(steps):
            started_at = time.perf_counter()
            decoded = self._step()
            seconds.append(time.perf_counter() - started_at)
            assert decoded == requests, "a step without all sequences"
        for request in requests:
            self._port.post(Abort(request))
        while self._engine.scheduler.requests:
            self._step()
        return prefill, seconds[-steps // 2 :]

    def _step(self) -> set[str]:
        """Run a step; requests that got a token in it."""
        self._engine.step()
        return {
            output.request_id
            for message in self._port.take()
            if isinstance(message, StepReport)
            for output in message.outputs
            if output.token_ids
        }


class Transformers:
    """transformers' model, one forward call a step."""

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        files = resolve(model)
        source = (
            {"pretrained_model_name_or_path": files.gguf.parent, "gguf_file": files.gguf.name}
            if files.gguf is not None
            else {"pretrained_model_name_or_path": files.directory}
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            **source, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        started_at = time.perf_counter()
        output = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        token_ids = output.logits[:, -1].argmax(-1, keepdim=True)
        prefill = time.perf_counter() - started_at
        seconds = []
        for _ in range(steps):
            started_at = time.perf_counter()
            output = self._model(token_ids, past_key_values=output.past_key_values, use_cache=True)
            token_ids = output.logits[:, -1].argmax(-1, keepdim=True)
            token_ids.tolist()
            seconds.append(time.perf_counter() - started_at)
        return prefill, seconds[-steps // 2 :]


class LlamaCpp:
    """llama.cpp on the GGUF file as it is, one sequence at a time."""

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import Llama

        path = resolve(model).gguf
        self._model = Llama(
            str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        (prompt,) = prompts
        self._model.reset()
        started_at = time.perf_counter()
        self._model.eval(prompt)
        token = self._model.sample(temp=0.0)
        prefill = time.perf_counter() - started_at
        seconds = []
        for _ in range(steps):
            started_at = time.perf_counter()
            self._model.eval([token])
            token = self._model.sample(temp=0.0)
            seconds.append(time.perf_counter() - started_at)
        return prefill, seconds[-steps // 2 :]


def measure(
    contenders: dict[str, Contender], options: argparse.Namespace, vocab_size: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by row and contender, one figure a round; the contenders take turns."""
    figures: dict[str, dict[str, list[float]]] = {}
    rng = random.Random(1)
    for turn in range(-1, options.rounds):  # the first turn warms up
        for batch in BATCHES:
            prompts = [
                [rng.randrange(vocab_size) for _ in range(options.context)] for _ in range(batch)
            ]
            for name, contender in contenders.items():
                if batch > 1 and name == "llama.cpp":
                    continue
                prefill, seconds = contender.run(prompts, options.steps)
                if turn < 0:
                    continue
                if batch == 1:
                    row = figures.setdefault("prefill", {})
                    row.setdefault(name, []).append(options.context / prefill)
                row = figures.setdefault(f"decode, batch {batch}", {})
                row.setdefault(name, []).append(batch / statistics.median(seconds))
    return figures


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """The figures as a Markdown table: median, and least and most of the rounds."""

    def cell(values: list[float], digits: int) -> str:
        low, high = min(values), max(values)
        return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    names = list(figures["prefill"])
    lines = [
        "| tokens per second | " + " | ".join(names) + " | memd / transformers |",
        "|" + "---|" * (len(names) + 2),
    ]
    for row, by_name in figures.items():
        ratios = [a / b for a, b in zip(by_name["memd"], by_name["transformers"], strict=True)]
        cells = [cell(by_name[name], 1) if name in by_name else "-" for name in names]
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {cell(ratios, 2)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="what model.path takes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=32, help="decoding steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contenders: dict[str, Contender] = {
        "memd": Memd(options.model, options.dtype, options.threads),
        "transformers": Transformers(options.model, options.dtype),
    }
    if importlib.util.find_spec("llama_cpp"):
        contenders["llama.cpp"] = LlamaCpp(options.model, options.threads)
    figures = measure(contenders, options, read_config(resolve(options.model)).vocab_size)
    print(json.dumps(figures) if options.format == "json" else table(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
