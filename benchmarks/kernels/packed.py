"""Decode attention over packed pages on a GPU, beside full pages in the same run.

    PYTHONPATH=.:kernels python benchmarks/kernels/packed.py [--sweep] [--seconds 300]

The first and last 128 tokens of each sequence are in full pages, as when serving. Each format is
checked first against the reference over the same pages. Times are medians as in `decode.py`, of
full and packed pages in turn; `--sweep` looks for the best launch of each format. Ends with 1 if a
result is wrong or a case fails.
"""

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
from decode_batch import DEVICE, Batch, Run, layers_for, make_batch, measure, say, use
from memd_kernels import reference
from memd_kernels.formats import PACKED_PAGE, FormatName, PackedFormat, PackedPages, view_packed
from memd_kernels.launch import LaunchConfig
from memd_kernels.plan import DecodePlan
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.packed_launch import FP8_CAPABILITY
from memd_kernels.triton.packed_pages import pack_pages, unpack_pages
from memd_kernels.triton.plan import plan_decode
from torch import Tensor

ANCHORS = ((1, 32768), (8, 8192), (64, 8192), (128, 2048))
FULL_TOKENS = 128  # at each end
FORMATS: tuple[FormatName, ...] = ("int8", "int4", "fp8")
TOLERANCE = 1e-2  # against the reference over the same packed pages


@dataclass
class PackedBatch:
    """A batch whose page table names packed pages, in a memory of their own."""

    full: Batch
    packed: PackedPages
    table: Tensor
    errors: Tensor

    def plan(self) -> DecodePlan:
        batch = self.full
        heads = batch.q.shape[1]
        return plan_decode(batch.lens, batch.kv, heads, None, None, 0, self.table, self.packed)

    def decode(self, layer: int, plan: DecodePlan) -> Tensor:
        batch = self.full
        return decode_attention(
            *(batch.q, batch.kv, layer, self.table, batch.lens, batch.scale, None, plan),
            packed=self.packed,
        )


def pack_batch(batch: Batch, name: FormatName) -> PackedBatch:
    """The batch with all pages packed but those of the first and last tokens."""
    layers, _, heads, page_tokens, dim = batch.kv.shape[2:]
    format = PackedFormat(name, page_tokens, dim)
    full_pages = -(-FULL_TOKENS // page_tokens)
    last = batch.lens // page_tokens - full_pages
    column = torch.arange(batch.table.shape[1], device=DEVICE)
    chosen = (column >= full_pages) & (column < last[:, None])
    sources = batch.table[chosen]
    block_bytes = 8 * format.page_bytes(layers, heads)
    size = -(-len(sources) // 8) * block_bytes
    memory = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    packed = view_packed(memory, format, block_bytes, layers, heads)
    targets = torch.randperm(len(sources), device=DEVICE).int()
    errors = pack_pages(batch.kv, packed, sources, targets)
    table = batch.table.clone()
    table[chosen] = targets + PACKED_PAGE
    return PackedBatch(batch, packed, table, errors)


def check(name: FormatName) -> str:
    """The kernel against the reference over the same pages, and against full pages."""
    lens = [1, 0, 700, 8191, 3000, 4096]
    full = make_batch(lens, layers=2)
    batch = pack_batch(full, name)
    plan = batch.plan()
    out = batch.decode(1, plan)
    host = PackedPages(batch.packed.format, batch.packed.memory.cpu())
    expected = reference.decode_attention(
        full.q.float().cpu(),
        full.kv.float().cpu(),
        1,
        batch.table.cpu(),
        full.lens.cpu(),
        full.scale,
        None,
        packed=host,
    ).to(DEVICE)
    error = float((out - expected).norm() / expected.norm())
    if not error < TOLERANCE or out[1].any():
        raise AssertionError(f"error {error:.2e}")
    for _ in range(50):
        if not torch.equal(batch.decode(1, plan), out):
            raise AssertionError("bits differ from run to run")
    exact = full.decode(1, full.plan())
    lost = float((out.float() - exact.float()).norm() / exact.float().norm())
    return f"error {error:.1e}, against full pages {lost:.1e}, of pages {batch.errors.max():.1e}"


def time_formats(run: Run, rows: int, context: int, formats: tuple[FormatName, ...]) -> None:
    layers = layers_for(rows * context, 4096)
    full = make_batch([context] * rows, layers=layers)
    base, spread = measure(partial(full.decode, plan=full.plan()), layers)
    say(f"{rows}x{context} full: {base:.1f} ±{spread:.1f} us")
    for name in formats:

        def time_one(name: FormatName = name) -> str:
            batch = pack_batch(full, name)
            median, spread = measure(partial(batch.decode, plan=batch.plan()), layers)
            return f"{median:.1f} ±{spread:.1f} us, {base / median:.2f} times as fast"

        run.case(f"{rows}x{context} {name}", time_one)


def time_packing(name: FormatName) -> str:
    """What packing and unpacking cost a page of 32 layers and 8 heads."""
    full = make_batch([64 * 64], layers=32)
    batch = pack_batch(full, name)
    pages = full.table[0, :16].contiguous()
    slots = torch.arange(16, dtype=torch.int32, device=DEVICE)
    pack, _ = measure(lambda _: pack_pages(full.kv, batch.packed, pages, slots), 4)
    unpack, _ = measure(lambda _: unpack_pages(batch.packed, full.kv, slots, pages), 4)
    return f"pack {pack / 16:.1f} us a page, unpack {unpack / 16:.1f}"


def sweep(run: Run, name: FormatName, rows: int, context: int) -> str:
    layers = layers_for(rows * context, 4096)
    batch = pack_batch(make_batch([context] * rows, layers=layers), name)
    found = []
    for warps, tile, stages, splits in itertools.product(
        (1, 2, 4), (32, 64), (2, 3, 4), (2, 4, 6, 8, 12)
    ):
        if run.left() < 5:
            break
        use("decode_attention", LaunchConfig(warps, stages, block_n=tile, splits=splits))
        try:
            median, _ = measure(partial(batch.decode, plan=batch.plan()), layers, replays=7)
        except Exception as error:
            say("sweep", warps, tile, stages, splits, type(error).__name__, str(error)[:80])
            continue
        found.append((median, f"w{warps} t{tile} s{stages} x{splits}"))
    use("decode_attention", None)
    found.sort()
    return "; ".join(f"{us:.1f} {config}" for us, config in found[:6])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="look for the best launches")
    parser.add_argument("--seconds", type=float, default=300, help="end by then")
    options = parser.parse_args()
    torch.manual_seed(0)
    run = Run(options.seconds)
    started = time.monotonic()
    has_fp8 = torch.cuda.get_device_capability() >= FP8_CAPABILITY
    formats = FORMATS if has_fp8 else FORMATS[:2]
    for name in formats:
        run.case(f"check {name}", partial(check, name))
    for rows, context in ANCHORS:
        time_formats(run, rows, context, formats)
    for name in formats:
        run.case(f"pages of {name}", partial(time_packing, name))
    if options.sweep:
        for name, (rows, context) in itertools.product(formats, ANCHORS):
            run.case(f"sweep {name} {rows}x{context}", partial(sweep, run, name, rows, context))
    say(f"{run.failed} failed, {time.monotonic() - started:.0f} s")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
