"""The engine on a GPU gives the text of the engine on the CPU, also short of memory.

    python benchmarks/device/engine.py [--quick]

A small model with random weights, float32 on both sides: greedy and seeded requests of mixed
lengths alone, together, in small chunks, and in a pool with room for a tenth of them and a host
tier. In bfloat16 it tells how many texts differ between a request alone and in a batch. Exits 1 if
a float32 text is wrong.
"""

import argparse
import random
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from memd.bench.shapes import SHAPES, random_tensors
from memd.config import dump
from memd.config_sources import load
from memd.engine.build import assemble_engine
from memd.engine.messages import SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.decoder import Decoder
from memd.pool.audit import check

CONFIG = replace(SHAPES["smol135m"], num_layers=4, windows=(None, 100, None, None), vocab_size=4096)
TENSORS = random_tensors(CONFIG, torch.float32, torch.device("cpu"))


class Serving:
    """An engine on a device."""

    def __init__(self, device: str, dtype: torch.dtype, *settings: str) -> None:
        where = torch.device(device)
        # Larger than trained weights: next tokens then depend on what was attended to.
        tensors = {name: (t * 3 if t.ndim > 1 else t).to(dtype) for name, t in TENSORS.items()}
        self._port = InlinePort()
        tree = load(
            assignments=["engine.max_sequences=64", "memory.limit=65536 tokens", *settings],
            environment={},
        )
        start = Start(dump(tree), 1, CONFIG.vocab_size, [])
        decoder = Decoder(CONFIG, tensors, where)
        self.engine, _ = assemble_engine(
            self._port, start, tree, CONFIG, decoder.forward, where, dtype, "test"
        )

    def run(self, work: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        texts: dict[str, list[int]] = {}
        for index, (prompt, sampling) in enumerate(work):
            texts[str(index)] = []
            self._port.post(Submit(str(index), prompt, sampling))
        left = len(work)
        while left:
            self.engine.step()
            for message in self._port.take():
                for output in message.outputs if isinstance(message, StepReport) else ():
                    if output.error:
                        print("error", output.error)
                    texts[output.request_id] += output.token_ids
                    left -= output.finish_reason is not None
        while self.engine.busy:
            self.engine.step(0.001)
        self._port.take()
        found = check(self.engine.pool)
        if found:
            print("audit", found)
        return list(texts.values())


def work(count: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to `longest` tokens, some with a common beginning, and how they are sampled."""
    rng = random.Random(3)
    shared = [rng.randrange(CONFIG.vocab_size) for _ in range(longest)]
    found = []
    for index in range(count):
        length = rng.randrange(1, longest)
        keep = rng.choice([0, 0, length // 2])
        prompt = shared[:keep] + [rng.randrange(CONFIG.vocab_size) for _ in range(length - keep)]
        options: dict[str, Any] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
            {"temperature": 0.0, "frequency_penalty": 0.5},
        ][index % 4]
        found.append((prompt, SamplingParams(index, rng.randrange(1, 60), **options)))
    return found


def main() -> None:
    """Run all, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(8)
    jobs = work(16 if options.quick else 48, 300 if options.quick else 700)
    started_at = time.perf_counter()
    expected = Serving("cpu", torch.float32).run(jobs)
    print(f"CPU: {time.perf_counter() - started_at:.1f} s", flush=True)
    wrong = 0
    cases: dict[str, list[str]] = {
        "together": [],
        "chunks of 64": ["engine.max_batch_tokens=64"],
        "pages of 16": ["memory.page_tokens=16"],
        "pages of 128": ["memory.page_tokens=128"],
        "short of memory": ["memory.limit=2048 tokens", "memory.host.limit=4GB"],
    }
    for name, settings in cases.items():
        started_at = time.perf_counter()
        serving = Serving("cuda", torch.float32, *settings)
        ready = time.perf_counter() - started_at
        texts = serving.run(jobs)
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        wrong += len(jobs) - same
        print(
            f"float32, {name}: {same} of {len(jobs)} texts as on the CPU, ready {ready:.1f} s, "
            f"run {time.perf_counter() - started_at - ready:.1f} s, preemptions "
            f"{serving.engine.scheduler.counters.preemptions}",
            flush=True,
        )
        for text, right, (prompt, sampling) in zip(texts, expected, jobs, strict=True):
            if text != right:
                at = next(i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b)
                print(f"  differs at {at} of {len(right)}, prompt {len(prompt)}, {sampling}")
        del serving
        torch.cuda.empty_cache()
    serving = Serving("cuda", torch.bfloat16)
    greedy = [(prompt, replace_sampling(sampling)) for prompt, sampling in jobs]
    together = serving.run(greedy)
    alone = [serving.run([job])[0] for job in greedy]
    differing = sum(a != b for a, b in zip(together, alone, strict=True))
    print(f"bfloat16: {differing} of {len(jobs)} greedy texts differ alone and together")
    sys.exit(bool(wrong))


def replace_sampling(sampling: SamplingParams) -> SamplingParams:
    """The same, greedy."""
    return SamplingParams(sampling.seed, sampling.max_tokens, temperature=0.0)


if __name__ == "__main__":
    main()
