"""What packed pages cost in quality and save in memory.

    python benchmarks/compression.py [--tokens 8192] [--kv int8,int4] [--threads 1] [--accounts]

Quality is perplexity of the demo model on the help texts that every Python carries, as `memd eval`
measures it, with pages of 64 tokens as on a GPU. Memory of larger shapes is arithmetic: bytes of
their pages in bfloat16 and packed, and of the blocks that hold them. `--accounts`: only that.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

# As the daemon starts its engine; read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from memd_kernels.formats import PackedFormat

from memd.config_sources import load
from memd.evaluate.accounting import footprint
from memd.evaluate.policy import KVPolicy, read_formats
from memd.evaluate.report import evaluate
from memd.pool.layout import plan_layout
from memd.units import format_size

PAGE_TOKENS = 64
GRANULE_BYTES = 2 << 20
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Shape:
    """Of a model's KV, and the length of a sequence."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int


SHAPES = (
    Shape("SmolLM2-135M, 8k", 30, 3, 64, 8192),
    Shape("7B, 32k", 32, 32, 128, 32768),
    Shape("8B grouped heads, 128k", 32, 8, 128, 131072),
    Shape("8B grouped heads, 256k", 32, 8, 128, 262144),
)


def account(shape: Shape, policy: KVPolicy) -> dict[str, Any]:
    """Memory of one sequence, bfloat16 where it is not packed."""
    packed_page_bytes = None
    if policy.kv != "full":
        packed = PackedFormat(policy.kv, PAGE_TOKENS, shape.head_dim)
        packed_page_bytes = packed.page_bytes(shape.num_layers, shape.num_kv_heads)
    layout = plan_layout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        element_bytes=2,
        page_tokens=PAGE_TOKENS,
        granule_bytes=GRANULE_BYTES,
        target_block_bytes=BLOCK_BYTES,
        packed_page_bytes=packed_page_bytes,
    )
    found = footprint(layout, policy, shape.num_tokens)
    full = footprint(layout, KVPolicy(), shape.num_tokens)
    return {
        "shape": shape.name,
        "kv": policy.kv,
        "full_pages": found.full_pages,
        "packed_pages": found.packed_pages,
        "kv_bytes": found.kv_bytes,
        "ratio": full.kv_bytes / found.kv_bytes,
        "block_bytes": layout.block_bytes,
        "committed_bytes": found.committed_bytes,
        "used_share": found.used_share,
    }


def measure(model: str, policies: list[KVPolicy], num_tokens: int, threads: str) -> dict[str, Any]:
    """`memd eval` on the help texts."""
    settings = load(
        assignments=[
            f"model.path={model}",
            f"memory.page_tokens={PAGE_TOKENS}",
            f"engine.threads={threads}",
        ],
        environment={},
    )
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topics.txt"
        path.write_text(text, encoding="utf-8")

        def progress(done: int, total: int) -> None:
            if done % 1024 == 0:
                print(f"{done:,} of {total:,} tokens", file=sys.stderr)

        return evaluate(settings, path, num_tokens, policies, progress)


def print_quality(report: dict[str, Any]) -> None:
    """As a table of the performance page."""
    facts = f"{report['model']}, {report['tokens']:,} tokens, {report['dtype']}"
    print(f"{facts}, full KV: perplexity {report['full']['perplexity']:.4f}\n")
    print("| pages | perplexity | rise | same first choice | divergence | less than bfloat16 |")
    print("|---|---|---|---|---|---|")
    for row in report["rows"]:
        print(
            f"| {row['kv']} | {row['perplexity']:.4f} | {row['rise']:+.3%} "
            f"| {row['agreement']:.2%} | {row['divergence']:.5f} | {row['bfloat16_ratio']:.2f}x |"
        )


def print_accounts(rows: list[dict[str, Any]]) -> None:
    """As a table of the performance page."""
    print("\n| shape | pages | full, packed | KV | less than bfloat16 | block | used of blocks |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        pages = f"{row['full_pages']:,} + {row['packed_pages']:,}"
        print(
            f"| {row['shape']} | {row['kv']} | {pages} | {format_size(row['kv_bytes'])} "
            f"| {row['ratio']:.2f}x | {format_size(row['block_bytes'])} "
            f"| {row['used_share']:.1%} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_HELP)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kv", default="int8,int4")
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--accounts", action="store_true")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    policies = [KVPolicy(name) for name in read_formats(options.kv)]
    accounts = [account(shape, policy) for shape in SHAPES for policy in policies]
    report = (
        None
        if options.accounts
        else measure(options.model, policies, options.tokens, options.threads)
    )
    if options.format == "json":
        print(json.dumps({"quality": report, "accounts": accounts}, indent=2))
        return
    if report is not None:
        print_quality(report)
    print_accounts(accounts)


_HELP = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
