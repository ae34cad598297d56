"""What memd promises under pressure, kills, live changes, open load and shared prompts.

    python benchmarks/holds.py [--device cuda|cpu] [--shape smol135m|tiny] [--parts ...]

Starts `memd serve` over a model with random weights, which is written to a temporary folder, and
compares texts with those of the same requests left alone, in float32. `pressure`: requests whose KV
is 20 times the pool, with a host tier, twice. `kills`: the engine is killed three times during 8
streams. `live`: watermarks and the limit change during 8 streams. `shared`: prompts that begin
alike, with and without sharing. `invariant`: the kills with `engine.batch_invariant`, in bfloat16
on a GPU. `open`: Poisson arrivals at three rates, in bfloat16 likewise. Prints a table and a JSON
object; exits with 1 if a promise was not kept.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before anything imports them: whoever runs this where memd is not installed is told all of them.
NEEDED = (
    "alembic apprise apscheduler fastapi gguf httptools httpx2 huggingface_hub jinja2 msgspec "
    "numba prometheus_client pydantic pynvml rich safetensors sqlalchemy tokenizers torch triton "
    "typer uvicorn uvloop yaml zmq"
)
if missing := [name for name in NEEDED.split() if importlib.util.find_spec(name) is None]:
    sys.exit(f"modules that memd needs are missing: {', '.join(missing)}")

from holds_parts import PARTS, Found  # noqa: E402
from holds_stand import Scale, standing  # noqa: E402
from random_model import write_model  # noqa: E402

from memd.bench.shapes import SHAPES  # noqa: E402

TINY = replace(
    SHAPES["smol135m"],
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    rope_dim=32,
    windows=(None, None),
)
SHAPES_HERE = {"smol135m": SHAPES["smol135m"], "tiny": TINY}
SCALES = {
    "cuda": Scale(
        requests=64,
        prompt=128,
        output=128,
        stream_output=1200,
        shared=1024,
        own=96,
        filling=1024,
        large=131072,
        small=819,
        rates=(10.0, 40.0, 120.0),
        seconds=8.0,
        settings=("memory.host.limit=4GB",),
    ),
    "cpu": Scale(
        requests=64,
        prompt=20,
        output=20,
        stream_output=600,
        shared=320,
        own=20,
        filling=800,
        large=65536,
        small=128,
        rates=(5.0, 20.0, 40.0),
        seconds=2.0,
        # Blocks of as many pages as on a GPU; on the host less than the pool gives back, as
        # both are memory of the same process.
        settings=(
            "memory.host.limit=4MB",
            "memory.page_tokens=16",
            "memory.block_size=128KB",
            "engine.threads=1",
        ),
    ),
}


def measure(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, Found]]:
    """Each part, over a daemon with its settings, and what else went wrong."""
    shape = SHAPES_HERE[options.shape]
    model, scale = write_model(directory / options.shape, shape), SCALES[options.device]
    for index, given in enumerate(dict.fromkeys(PARTS[name][1] for name in options.parts)):
        settings = (*given, "engine.max_sequences=64", *options.set)
        state, began_at = directory / f"state{index}", time.monotonic()
        told = ", ".join(given) or "defaults"
        try:
            with standing(
                state, model, options.device, shape.vocab_size, scale, *settings
            ) as stand:
                yield f"start, {told}", ({"seconds": time.monotonic() - began_at}, [])
                for name in options.parts:
                    if PARTS[name][1] == given:
                        yield name, PARTS[name][0](stand)
        except (SystemExit, Exception) as error:  # the next parts still tell something
            yield f"end, {told}", ({}, [f"{type(error).__name__}: {error}"[-4000:]])
        log = (state / "log").read_text()
        if "Traceback" in log:
            yield f"log, {told}", ({}, [log[log.index("Traceback") :][:2000]])


def rows(name: str, found: Found) -> Iterator[str]:
    """A part's lines of the table."""
    facts, wrong = found
    cells = []
    for key, value in facts.items():
        if isinstance(value, dict):
            yield f"| {name}, {key} | | {_open_cells(value)} |"
        else:
            number = f"{value:.4g}" if isinstance(value, float) else str(value)
            cells.append(f"{key.replace('_', ' ')} {number}")
    yield f"| {name} | {'; '.join(wrong) or 'yes'} | {', '.join(cells)} |"


def _open_cells(result: dict[str, Any]) -> str:
    def told(name: str) -> str:
        values = result[f"{name}_seconds"].values()
        return "/".join("-" if each is None else f"{each * 1e3:.1f}" for each in values)

    return (
        f"{result['requests']} requests, first token {told('first_token')} ms, between tokens "
        f"{told('between_tokens')} ms (p50/p95/p99), {result['output_tokens_per_second']:.0f} "
        f"tokens/s, {sum(result['failures'].values())} failures"
    )


def main() -> int:
    """1 when a promise was not kept."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", choices=list(SCALES), default="cuda")
    options.add_argument("--shape", choices=list(SHAPES_HERE), default="smol135m")
    options.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = options.parse_args()
    told, failed = {}, False
    print("| part | kept | figures |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, found in measure(chosen, Path(directory)):
            print("\n".join(rows(name, found)), flush=True)
            told[name] = {**found[0], "violations": found[1]}
            failed |= bool(found[1])
    print(json.dumps(told))
    return failed


if __name__ == "__main__":
    sys.exit(main())
