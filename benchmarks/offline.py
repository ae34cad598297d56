"""Offline throughput of the engine on a GPU: all requests at once, random weights.

    python benchmarks/offline.py --shape llama8b [--cases single batch64 …] [--format json]

The engine runs in this process, without the HTTP server. Each run has new random prompts; figures
are medians over runs after one warm-up. `floor` is the least time the output can take on this card:
for each decoding step the weights and the KV read once at `--read-limit`, for each prefill its
matrix products at `--matmul-limit`. `host` is the engine's own time a step, without waiting for the
device.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from memd.config import dump
from memd.config_sources import load
from memd.engine.build import assemble_engine
from memd.engine.engine import Engine
from memd.engine.messages import SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder

_COMMON: dict[str, Any] = {
    "architecture": "llama",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "dtype": "bfloat16",
}
SHAPES = {
    "llama8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=5e5,
        rope_dim=128,
        tie_embeddings=False,
        windows=(None,) * 32,
        **_COMMON,
    ),
    "smol135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope_theta=1e5,
        rope_dim=64,
        tie_embeddings=True,
        windows=(None,) * 30,
        **_COMMON,
    ),
}


@dataclass(frozen=True)
class Case:
    """So many requests of so many tokens in, of which the first are the same for all, and out."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0


CASES = {
    "single": Case(1, 128, 256),
    "batch64": Case(64, 256, 512),
    "batch256": Case(256, 256, 256),
    "long256": Case(256, 1024, 128),
    "prefill256": Case(256, 1024, 1),
    "shared256": Case(256, 4160, 64, shared_tokens=4096),
}


def random_tensors(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Random parameters under the names that `Decoder` takes."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{index}.{norm}.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 1
        else torch.randn(shape, dtype=dtype, device=device, generator=generator) * 0.02
        for name, shape in shapes.items()
    }


class Bench:
    """An engine with random weights, and how long things take on it."""

    def __init__(self, shape: str, settings: list[str]) -> None:
        self.config = SHAPES[shape]
        device = torch.device("cuda", 0)
        dtype = torch.bfloat16
        decoder = Decoder(self.config, random_tensors(self.config, dtype, device), device)
        self._port = InlinePort()
        tree = load(assignments=["engine.max_sequences=256", *settings], environment={})
        started_at = time.perf_counter()
        start = Start(dump(tree), 1, self.config.vocab_size, [])
        self.engine: Engine
        self.engine, _ = assemble_engine(
            self._port, start, tree, self.config, decoder.forward, device, dtype, shape
        )
        self.start_seconds = time.perf_counter() - started_at
        self._rng = random.Random(1)
        self._serial = 0

    def run(self, case: Case) -> dict[str, float]:
        """One run of a case: seconds, and what the engine did in them."""
        shared = self._tokens(case.shared_tokens)
        sampling = SamplingParams(0, case.output_tokens, temperature=0.0, ignore_eos=True)
        for _ in range(case.requests):
            self._serial += 1
            prompt = shared + self._tokens(case.prompt_tokens - case.shared_tokens)
            self._port.post(Submit(str(self._serial), prompt, sampling))
        torch.cuda.synchronize()
        waited = self.engine.counters.wait_seconds
        started_at, steps, tokens, left = time.perf_counter(), 0, 0, case.requests
        while left:
            self.engine.step()
            steps += 1
            for message in self._port.take():
                for output in message.outputs if isinstance(message, StepReport) else ():
                    tokens += len(output.token_ids)
                    left -= output.finish_reason is not None
        seconds = time.perf_counter() - started_at
        waited = self.engine.counters.wait_seconds - waited
        assert tokens == case.requests * case.output_tokens, tokens
        return {
            "seconds": seconds,
            "output_tokens_per_second": tokens / seconds,
            "total_tokens_per_second": case.requests * case.prompt_tokens / seconds
            + tokens / seconds,
            "steps": steps,
            "host_milliseconds_per_step": (seconds - waited) / steps * 1e3,
            "milliseconds_per_step": seconds / steps * 1e3,
        }

    def floor_seconds(self, case: Case, read_limit: float, matmul_limit: float) -> float:
        """Least time for a case, see the module's docstring."""
        config = self.config
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        layer = hidden * dim * (2 * config.num_heads + 2 * config.num_kv_heads) + 3 * hidden * inner
        weights = layer * config.num_layers
        head = config.vocab_size * hidden
        new = case.prompt_tokens * case.requests - case.shared_tokens * (case.requests - 1)
        prefill = 2 * weights * new / matmul_limit
        context = case.prompt_tokens - case.shared_tokens + case.output_tokens / 2
        kv = config.kv_bytes_per_token(2) * (case.requests * context + case.shared_tokens)
        decode = (case.output_tokens - 1) * ((weights + head) * 2 + kv) / read_limit
        return prefill + decode

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self.config.vocab_size) for _ in range(count)]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="key=value settings")
    parser.add_argument("--read-limit", type=float, default=4573e9, help="bytes a second")
    parser.add_argument("--matmul-limit", type=float, default=757e12, help="operations a second")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    bench = Bench(options.shape, options.set)
    print(f"engine ready after {bench.start_seconds:.1f} s", flush=True)
    for name in options.cases:
        case = CASES[name]
        bench.run(case)
        runs = [bench.run(case) for _ in range(options.runs)]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rates = [run["output_tokens_per_second"] for run in runs]
        row |= {"least": min(rates), "most": max(rates)}
        floor = bench.floor_seconds(case, options.read_limit, options.matmul_limit)
        row["floor_share"] = floor / row["seconds"]
        if options.format == "json":
            print(json.dumps({"shape": options.shape, "case": name, **row}), flush=True)
            continue
        print(
            f"{options.shape} {name:10s} {row['seconds']:7.3f} s"
            f" {row['output_tokens_per_second']:9.1f} out/s ({min(rates):.0f}-{max(rates):.0f})"
            f" {row['total_tokens_per_second']:9.0f} total/s  {row['milliseconds_per_step']:6.2f}"
            f" ms/step, host {row['host_milliseconds_per_step']:5.2f}"
            f"  floor {row['floor_share']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
