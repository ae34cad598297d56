"""Prefill and flash attention on a GPU: right first, then how fast, beside torch's own.

`python benchmarks/kernels/prefill.py [--quick]`. Each correctness case runs in a process of its own
with a time limit, several at a time, so a kernel that faults or hangs costs only itself; timings
follow one after the other. Ends within 170 seconds (--quick: correctness only, 40) and with a
non-zero status if anything was wrong.
"""

import argparse
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from memd_kernels import reference
from memd_kernels.launch import LaunchConfig
from memd_kernels.reference.flash import flash_attention as reference_flash
from memd_kernels.triton.flash import FlashConfig, attend, default_config
from memd_kernels.triton.flash import flash_attention as triton_flash
from memd_kernels.triton.prefill import PrefillConfig, launch, prefill_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYER = 1
TIME_LIMIT = 165.0

HOPPER = PrefillConfig(128, 128, 4, 2, "hopper")
PREFILL_CASES: dict[str, tuple[Any, ...]] = {
    # lens, rows, query heads, KV heads, head_dim, page_tokens, window, dtype, config
    "hopper": ([700, 64, 1000], [500, 64, 1], 32, 8, 128, 64, None, BF16, HOPPER),
    "hopper, no overlap": (
        [700, 64, 1000], [500, 64, 1], 32, 8, 128, 64, None, BF16,
        PrefillConfig(128, 128, 4, 2, "hopper", overlap=False),
    ),
    "hopper, unpacked": (
        [700, 300], [500, 300], 32, 8, 128, 64, None, BF16,
        PrefillConfig(128, 128, 4, 2, "hopper", pack=False),
    ),
    "hopper, window": ([700, 64, 1000], [500, 64, 300], 32, 8, 128, 64, 200, BF16, HOPPER),
    "hopper, page 16": ([700, 64, 1000], [500, 64, 1], 32, 8, 128, 16, None, BF16, HOPPER),
    "hopper, page 128, window 33": ([700, 90], [500, 90], 8, 8, 128, 128, 33, FP16, HOPPER),
    "hopper, head 64": (
        [700, 64, 5], [500, 64, 5], 9, 3, 64, 64, None, BF16,
        PrefillConfig(128, 128, 4, 4, "hopper"),
    ),
    "tma": (
        [700, 64, 1000], [500, 64, 1], 32, 8, 128, 64, None, BF16,
        PrefillConfig(128, 64, 8, 3, "tma"),
    ),
    "tma, window": (
        [700, 64], [500, 64], 9, 3, 64, 128, 200, FP16, PrefillConfig(64, 64, 4, 3, "tma"),
    ),
    "pointers": (
        [700, 64, 1000], [500, 64, 1], 32, 8, 128, 64, 200, BF16, PrefillConfig(64, 64, 4, 2),
    ),
    "default, head 80, page 16": ([300, 77], [200, 77], 12, 4, 80, 16, None, FP16, None),
    "default, head 256": ([300, 77], [200, 77], 8, 4, 256, 32, None, BF16, None),
    "default, fp32": ([300, 77], [200, 77], 8, 2, 64, 64, 100, FP32, None),
}  # fmt: skip
FLASH_CASES: dict[str, tuple[Any, ...]] = {
    # B, S, query heads, KV heads, head_dim, causal, window, dtype
    "flash, head 128": (2, 777, 8, 2, 128, True, None, BF16),
    "flash, head 64, full": (2, 500, 6, 2, 64, False, None, FP16),
    "flash, window": (1, 777, 8, 2, 128, True, 200, BF16),
    "flash, head 80": (1, 333, 4, 4, 80, True, None, FP16),
    "flash, head 256": (1, 333, 4, 2, 256, True, None, BF16),
    "flash, fp32": (1, 333, 4, 2, 64, True, None, FP32),
}
GRAPH_CASE = "graph with changing lengths"
QUICK = ("hopper", "hopper, window", "hopper, head 64", "tma", "pointers", "default, fp32",
         "flash, head 128", GRAPH_CASE)  # fmt: skip


def paged(
    lens: list[int], rows: list[int], heads: int, kv_heads: int, dim: int, page: int,
    dtype: torch.dtype, spare: int = 5,
) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:  # fmt: skip
    """Arguments of `prefill_attention` up to kv_lens; free pages and slots hold NaN."""
    counts = [-(-length // page) for length in lens]
    per_block = 4
    blocks = -(-(sum(counts) + spare) // per_block)
    shape = blocks, per_block, 2, 2, kv_heads, page, dim
    kv = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    free = torch.randperm(blocks * per_block)
    table = torch.full((len(lens), max(counts) + 1), 2**30, dtype=torch.int32)
    used = 0
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        pages = free[used : used + count]
        used += count
        table[row, :count] = pages
        tokens = torch.randn(count, 2, kv_heads, page, dim, device="cuda").to(dtype)
        tokens[-1, :, :, length - (count - 1) * page :] = torch.nan
        kv[pages // per_block, pages % per_block, LAYER] = tokens
    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32).cuda()
    q = torch.randn(sum(rows), heads, dim, device="cuda").to(dtype)
    return q, kv, LAYER, table.cuda(), starts, torch.tensor(lens, dtype=torch.int32).cuda()


def error(out: Tensor, expected: Tensor) -> float:
    value = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    return math.inf if math.isnan(value) else value


def limit(dtype: torch.dtype) -> float:
    return {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}[dtype]


def prefill_case(name: str) -> str:
    lens, rows, heads, kv_heads, dim, page, window, dtype, config = PREFILL_CASES[name]
    arguments = paged(lens, rows, heads, kv_heads, dim, page, dtype)
    scale = dim**-0.5
    if config is None:
        out = prefill_attention(*arguments, scale, window)
    else:
        out = launch(*arguments, scale, window, config)
    q, kv, layer, table, *rest = arguments
    table = table.where(table < 2**30, 0)
    expected = reference.prefill_attention(
        q.double(), kv.double(), layer, table, *rest, scale, window
    )  # fmt: skip
    return verdict({"out": error(out, expected)}, limit(dtype))


def flash_case(name: str) -> str:
    batch, length, heads, kv_heads, dim, causal, window, dtype = FLASH_CASES[name]
    xs = [
        torch.randn(batch, length, n, dim, device="cuda").to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    wide = [x.detach().double().requires_grad_() for x in xs]
    scale = dim**-0.5
    out = triton_flash(*xs, causal, scale, window)
    expected = reference_flash(*wide, causal, scale, window)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient.double())
    errors = {"out": error(out, expected)}
    for key, x, w in zip("qkv", xs, wide, strict=True):
        errors["d" + key] = error(x.grad, w.grad)
    text = ""
    if window is None:  # what torch's own kernel loses on the same inputs
        own = [x.detach().requires_grad_() for x in xs]
        sdpa(*own, causal, scale).backward(gradient)
        losses = [error(x.grad, w.grad) for x, w in zip(own, wide, strict=True)]
        text = " torch " + " ".join(f"d{k} {v:.1e}" for k, v in zip("qkv", losses, strict=True))
    return verdict(errors, 2 * limit(dtype)) + text


def graph_case() -> str:
    """One captured launch, replayed over other lengths and page tables."""
    arguments = paged([700, 300], [200, 100], 32, 8, 128, 64, BF16)
    q, kv, layer, table, starts, lens = arguments
    prefill_attention(*arguments, 0.1, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_attention(*arguments, 0.1, None)
    worst = 0.0
    for new_starts, new_lens in (([0, 200, 300], [700, 300]), ([0, 0, 90], [64, 170]),
                                 ([0, 33, 300], [640, 267])):  # fmt: skip
        starts.copy_(torch.tensor(new_starts))
        lens.copy_(torch.tensor(new_lens))
        out.fill_(torch.nan)
        graph.replay()
        used = new_starts[-1]
        known = table.where(table < 2**30, 0)
        expected = reference.prefill_attention(
            q[:used].double(), kv.double(), layer, known, starts, lens, 0.1, None
        )
        worst = max(worst, error(out[:used], expected))
        if out[used:].any() or out.isnan().any():
            worst = math.inf
    return verdict({"out": worst}, limit(BF16))


def verdict(errors: dict[str, float], most: float) -> str:
    text = " ".join(f"{name} {value:.1e}" for name, value in errors.items())
    return ("ok    " if max(errors.values()) < most else "WRONG ") + text


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def median_ms(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=5, rep=40, return_mode="median"))


def time_prefill(deadline: float) -> None:
    configs = {
        "hopper": HOPPER,
        "hopper no overlap": PrefillConfig(128, 128, 4, 2, "hopper", overlap=False),
        "hopper unpacked": PrefillConfig(128, 128, 4, 2, "hopper", pack=False),
        "tma 128x64 w8": PrefillConfig(128, 64, 8, 3, "tma"),
        "tma 128x64 w4": PrefillConfig(128, 64, 4, 3, "tma"),
        "tma 64x64 w4": PrefillConfig(64, 64, 4, 3, "tma"),
        "tma 128x64 w8 unpacked": PrefillConfig(128, 64, 8, 3, "tma", pack=False),
        "pointers 128x64 w8": PrefillConfig(128, 64, 8, 3),
    }
    small = {
        "hopper": PrefillConfig(128, 128, 4, 4, "hopper"),
        "tma 128x64 w4": PrefillConfig(128, 64, 4, 3, "tma"),
        "tma 128x64 w8": PrefillConfig(128, 64, 8, 3, "tma"),
    }
    shapes = [(4, 4096, 4096), (4, 512, 8192), (1, 16384, 16384), (8, 2048, 2048),
              (1, 512, 8192), (8, 2048, 8192)]  # fmt: skip
    runs = [(*shape, 32, 8, 128, configs) for shape in shapes]
    runs.insert(2, (8, 2048, 2048, 9, 3, 64, small))
    for batch, new, context, heads, kv_heads, dim, candidates in runs:
        arguments = paged([context] * batch, [new] * batch, heads, kv_heads, dim, 64, BF16)
        pairs = batch * (new * (context - new) + new * (new + 1) / 2)
        work = 4 * heads * dim * pairs
        timed: dict[str, Callable[[], object]] = {}
        if new == context:
            q = arguments[0].view(batch, new, heads, dim)
            k = torch.randn(batch, new, kv_heads, dim, device="cuda").to(BF16)
            v = torch.randn_like(k)
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                timed[backend.name] = partial(sdpa_with, backend, q, k, v)
        for name, config in candidates.items():
            if config.variant != "hopper" or "SKIP_HOPPER" not in os.environ:
                timed[name] = partial(launch, *arguments, dim**-0.5, None, config)
        title = f"{batch}x{new} of {context}, {heads}/{kv_heads} heads of {dim}"
        report(title, timed, work, deadline)


def report(
    title: str, timed: dict[str, Callable[[], object]], work: float, deadline: float
) -> None:
    """Print TFLOP/s of each, all in one line."""
    cells = []
    for name, run in timed.items():
        if time.monotonic() > deadline:
            cells.append(f"{name} -")
            continue
        try:
            ms = median_ms(run)
            cells.append(f"{name} {work / ms / 1e9:.0f} TF {ms * 1e3:.0f} us")
        except Exception as problem:
            cells.append(f"{name} FAILED {last_line(problem)}")
    print(f"{title}: " + " | ".join(cells), flush=True)


def time_flash(deadline: float) -> None:
    for batch, length in ((4, 4096), (1, 8192), (1, 16384), (1, 32768)):
        xs = [
            torch.randn(batch, length, n, 128, device="cuda").to(BF16).requires_grad_()
            for n in (32, 8, 8)
        ]
        gradient = torch.randn_like(xs[0])
        work = 4 * 32 * 128 * batch * length * (length + 1) / 2
        base = default_config(xs[0])
        ways: dict[str, Callable[..., Tensor]] = {
            "memd": lambda *x, c=base: attend(*x, True, 128**-0.5, None, c),
            "torch flash": partial(sdpa_with, SDPBackend.FLASH_ATTENTION),
            "cudnn": partial(sdpa_with, SDPBackend.CUDNN_ATTENTION),
            "unfused": unfused,
        }
        if length == 4096:
            del ways["unfused"]
            query = LaunchConfig(4, 2, 64, 64)
            fast = FlashConfig(LaunchConfig(8, 2, 128, 128), query, base.key_value)
            ways["memd, other tiles"] = lambda *x, c=fast: attend(*x, True, 128**-0.5, None, c)
            wide = FlashConfig(LaunchConfig(4, 3, 64, 64), base.query, LaunchConfig(8, 2, 32, 128))
            ways["memd, wide keys"] = lambda *x, c=wide: attend(*x, True, 128**-0.5, None, c)
        for name, way in ways.items():
            if time.monotonic() > deadline:
                print(f"flash {batch}x{length} {name}: -", flush=True)
                continue
            print(f"flash {batch}x{length} {name}: {measure(way, xs, gradient, work)}", flush=True)


def measure(way: Callable[..., Tensor], xs: list[Tensor], gradient: Tensor, work: float) -> str:
    """Forward and backward time, and peak memory beyond inputs and gradients."""
    for x in xs:
        x.grad = None
    try:
        with torch.no_grad():
            forward = median_ms(lambda: way(*xs))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = way(*xs)
        torch.autograd.grad(out, xs, gradient, retain_graph=True)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        backward = median_ms(lambda: torch.autograd.grad(out, xs, gradient, retain_graph=True))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as problem:
        return f"FAILED {last_line(problem)}"
    return (
        f"forward {forward:.2f} ms {work / forward / 1e9:.0f} TF, backward {backward:.2f} ms "
        f"{2.5 * work / backward / 1e9:.0f} TF, peak {peak:.0f} MiB"
    )


def last_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [repr(problem)])[-1][:80]


def sdpa_with(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return sdpa(q, k, v, True, q.shape[-1] ** -0.5)


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as operations in the dtype of the inputs, as models without a kernel do."""
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) * 128**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def run_case(name: str) -> int:
    torch.manual_seed(0)
    if name == "time prefill":
        time_prefill(time.monotonic() + float(os.environ["SECONDS_LEFT"]))
        return 0
    if name == "time flash":
        time_flash(time.monotonic() + float(os.environ["SECONDS_LEFT"]))
        return 0
    if name == GRAPH_CASE:
        line = graph_case()
    else:
        line = prefill_case(name) if name in PREFILL_CASES else flash_case(name)
    torch.cuda.synchronize()
    print(f"{name}: {line}", flush=True)
    return 0 if line.startswith("ok") else 1


def spawn(name: str, seconds: float) -> bool:
    """Run a case in a process of its own; print what it says."""
    environment = {**os.environ, "SECONDS_LEFT": str(max(seconds - 15, 1))}
    command = [sys.executable, __file__, "--case", name]
    try:
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            timeout=max(seconds, 1),
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired as slow:
        said = slow.stdout.decode() if isinstance(slow.stdout, bytes) else slow.stdout or ""
        print(f"{said}{name}: TOO SLOW or hung after {seconds:.0f} s", flush=True)
        return False
    if done.returncode and not done.stdout:
        print(f"{name}: FAILED {' / '.join(done.stderr.strip().splitlines()[-2:])[:300]}")
    print(done.stdout, end="", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few correctness cases only")
    parser.add_argument("--case", help="one case, in this process")
    options = parser.parse_args()
    if options.case:
        return run_case(options.case)
    began = time.monotonic()
    names = QUICK if options.quick else (*PREFILL_CASES, *FLASH_CASES, GRAPH_CASE)
    with ThreadPoolExecutor(8) as pool:
        right = list(pool.map(lambda name: spawn(name, 36 if options.quick else 50), names))
    if any(name.startswith("hopper") and not ok for name, ok in zip(names, right, strict=True)):
        os.environ["SKIP_HOPPER"] = "1"  # what hangs or faults would take the other timings along
    if not options.quick:
        for name, share in (("time prefill", 0.6), ("time flash", 1.0)):
            left = TIME_LIMIT - (time.monotonic() - began)
            right.append(spawn(name, left * share))
    print(f"{sum(right)} of {len(right)} right, {time.monotonic() - began:.0f} s", flush=True)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
