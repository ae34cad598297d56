"""Offline throughput of the engine in this process: all requests at once, no HTTP server."""

import gc
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from memd.bench.cases import Case
from memd.bench.shapes import SHAPES, floor_seconds, random_tensors
from memd.config import Settings, dump
from memd.engine.build import assemble_engine, load_engine
from memd.engine.device import choose_device
from memd.engine.engine import Engine
from memd.engine.messages import SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.hub import read_config, resolve


@dataclass(frozen=True)
class Run:
    """One run of a case.

    `host_seconds`: without waiting for the device.
    """

    seconds: float
    host_seconds: float
    steps: int


class OfflineBench:
    """An engine, and how long cases take on it.

    Attributes:
        config: The model's.

    Args:
        settings: Of the daemon; the model they name is loaded.
        shape: Instead, one of `SHAPES` in bfloat16 with random weights.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(self, settings: Settings, shape: str | None = None) -> None:
        self._port = InlinePort()
        self._rng = random.Random(1)
        self._serial = 0
        self.config: ModelConfig
        self._engine: Engine
        if shape is None:
            self.config = read_config(resolve(settings.model.path))
            start = Start(dump(settings), 1, self.config.vocab_size, [])
            self._engine, _ = load_engine(self._port, start)
        else:
            self.config, dtype = SHAPES[shape], torch.bfloat16
            device = choose_device(settings)
            decoder = Decoder(self.config, random_tensors(self.config, dtype, device), device)
            start = Start(dump(settings), 1, self.config.vocab_size, [])
            self._engine, _ = assemble_engine(
                *(self._port, start, settings, self.config, decoder.forward, device, dtype, shape)
            )
        gc.freeze()  # as an engine's process does it: looking through what is loaded takes 85 ms

    def run(self, case: Case) -> Run:
        """Generate a case once, greedily, from new random prompts."""
        sampling = SamplingParams(0, case.output_tokens, temperature=0.0, ignore_eos=True)
        for prompt in case.prompts(self._rng, self.config.vocab_size):
            self._serial += 1
            self._port.post(Submit(str(self._serial), prompt, sampling))
        waited = self._engine.counters.wait_seconds
        started_at, steps, tokens, left = time.perf_counter(), 0, 0, case.requests
        while left:
            self._engine.step()
            steps += 1
            for message in self._port.take():
                for output in message.outputs if isinstance(message, StepReport) else ():
                    tokens += len(output.token_ids)
                    left -= output.finish_reason is not None
        seconds = time.perf_counter() - started_at
        if tokens != case.requests * case.output_tokens:
            raise RuntimeError(f"{tokens} tokens came back for {case}")
        waited = self._engine.counters.wait_seconds - waited
        return Run(seconds, seconds - waited, steps)


def measure(
    bench: OfflineBench, case: Case, runs: int, read_limit: float | None, matmul_limit: float | None
) -> dict[str, Any]:
    """Figures of a case: medians over runs after one warm-up.

    `floor_ratio`: the least time the card allows over the median; None without both limits, see
    `floor_seconds`.
    """
    bench.run(case)
    found = [bench.run(case) for _ in range(runs)]
    rates = sorted(case.requests * case.output_tokens / run.seconds for run in found)
    seconds = statistics.median(run.seconds for run in found)
    steps = statistics.median(run.steps for run in found)
    floor = None
    if read_limit and matmul_limit:
        floor = floor_seconds(bench.config, case, read_limit, matmul_limit)
    return {
        "requests": case.requests,
        "prompt_tokens": case.prompt_tokens,
        "shared_tokens": case.shared_tokens,
        "output_tokens": case.output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": statistics.median(rates),
        "least_output_tokens_per_second": rates[0],
        "most_output_tokens_per_second": rates[-1],
        "total_tokens_per_second": case.requests
        * (case.prompt_tokens + case.output_tokens)
        / seconds,
        "step_seconds": seconds / steps,
        "host_seconds_per_step": statistics.median(run.host_seconds for run in found) / steps,
        "floor_ratio": None if floor is None else floor / seconds,
    }
