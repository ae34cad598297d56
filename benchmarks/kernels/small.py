"""The small kernels on a CUDA device: against the reference, then their times.

    python benchmarks/kernels/small.py [--quick]

`--quick`: correctness alone. Times are of CUDA graph replays, microseconds a call; the weights of
products are rotated so that none is found in a cache.
"""

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.nn.functional as F
from memd_kernels import reference, tune
from memd_kernels.launch import LaunchConfig
from memd_kernels.triton.linear import few_row_linear, launch_linear
from memd_kernels.triton.norm import rms_norm, silu_mul
from memd_kernels.triton.pages import move_pages
from memd_kernels.triton.rope import rope_and_store
from memd_kernels.triton.sample import argmax, sample
from torch import Tensor

DEVICE = torch.device("cuda", 0)
READ_LIMIT = 4573.0  # GB/s, of an H200
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_p": 0.99, "min_p": 0.02},
    {"min_p": 0.05},
    {"top_k": 5000, "top_p": 0.95, "temperature": 1.5},
]

failures: list[str] = []


def say(line: str) -> None:
    print(line, flush=True)


def attempt(name: str, case: Callable[[], str]) -> None:
    """Run a case; a failure is a line and is counted, and the others go on."""
    try:
        say(f"ok   {name}: {case()}")
    except Exception as error:
        failures.append(name)
        say(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}")
        if not isinstance(error, AssertionError):
            say("     " + traceback.format_exc(limit=-2).replace("\n", "\n     "))


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def error_of(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact."""
    difference = (found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return float(difference)


def pages_memory(
    layers: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, blocks: int = 4
) -> Tensor:
    """KV memory of NaN, with waste at the end of each block."""
    page = (layers, 2, heads, tokens, dim)
    numel = 5 * torch.Size(page).numel()
    memory = torch.full((blocks, numel + 4096), torch.nan, device=DEVICE, dtype=dtype)
    return memory[:, :numel].unflatten(1, (5, *page))


def sampling(settings: list[dict[str, float]], seed: int = 0) -> list[Tensor]:
    rows = len(settings)

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values = [row.get(name, OFF[name]) for row in settings]
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return [
        torch.arange(rows, device=DEVICE) + seed * 1_000_003,
        torch.arange(rows, device=DEVICE) * 7 + seed,
        column("temperature", F32),
        column("top_k", torch.int64),
        column("top_p", F32),
        column("min_p", F32),
    ]


def check_linear(dtype: torch.dtype, rows: int, size: int, depth: int, biased: bool) -> str:
    x, weight = randn(rows, depth, dtype=dtype), randn(size, depth, dtype=dtype)
    bias = randn(size, dtype=dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    worst = 0.0
    for splits in (0, 1, 3):
        blocks = (64, 128, 4) if dtype != F32 else (32, 32, 2)
        launch = LaunchConfig(4, blocks[2], 0, blocks[0], blocks[1], splits)
        out = launch_linear(x, weight, bias, launch)
        for _ in range(3):
            assert torch.equal(out, launch_linear(x, weight, bias, launch)), "bits differ"
        worst = max(worst, error_of(out, exact))
    library = error_of(F.linear(x, weight, bias), exact)
    assert worst < max(2 * library, 1e-5), f"error {worst:.2e}, library {library:.2e}"
    return f"error {worst:.2e}, library {library:.2e}"


def check_norm(dtype: torch.dtype, rows: int, size: int) -> str:
    x, residual, weight = (randn(rows, size, dtype=dtype) for _ in range(3))
    weight = weight[0].contiguous()
    normed, total = rms_norm(x, weight, 1e-5, residual)
    expected, expected_total = reference.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, expected_total), "sums differ"
    gated, expected_gated = silu_mul(x), reference.silu_mul(x)
    errors = error_of(normed, expected), error_of(gated, expected_gated)
    assert max(errors) < torch.finfo(dtype).eps, f"errors {errors}"
    return f"errors {errors[0]:.1e} {errors[1]:.1e}"


def check_rope(dtype: torch.dtype, dim: int, half: int, normed: bool, rows: int) -> str:
    heads, kv_heads, tokens = 12, 4, 16
    qkv = randn(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    angles = torch.rand(rows, half, device=DEVICE) * 100
    slots = torch.randperm(20 * tokens, device=DEVICE)[:rows]
    pages, offsets = slots // tokens, (slots % tokens).int()
    pages[rows // 2] = -1
    norms = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if normed else (None, None)
    results = []
    for function in (rope_and_store, reference.rope_and_store):
        kv = pages_memory(3, kv_heads, tokens, dim, dtype)
        rotation = angles.cos(), angles.sin()
        results.append((function(q, k, v, *rotation, kv, 2, pages, offsets, *norms, 1e-6), kv))
    (out, kv), (expected, expected_kv) = results
    assert torch.equal(kv.isnan(), expected_kv.isnan()), "written elsewhere"
    errors = error_of(out, expected), error_of(kv.nan_to_num(), expected_kv.nan_to_num())
    assert max(errors) < torch.finfo(dtype).eps, f"errors {errors}"
    return f"errors {errors[0]:.1e} {errors[1]:.1e}"


def check_moves(dtype: torch.dtype) -> str:
    kv = pages_memory(3, 2, 16, 80, dtype)
    kv.copy_(randn(*kv.shape, dtype=dtype))
    moves = torch.tensor(
        [[13, 2, 4, -1, 19], [0, 5, 6, 1, 8], [3, 16, 0, 4, 9]], dtype=torch.int32, device=DEVICE
    )
    for counts in (None, moves[2]):
        expected = kv.clone()
        reference.move_pages(expected, moves[0], moves[1], counts)
        move_pages(kv, moves[0], moves[1], counts)
        assert torch.equal(kv, expected), "pages differ"
    return "equal"


def check_sample(rows: int, vocab: int, spread: float, rounded: bool) -> str:
    """Draws against the reference on the CPU: the weights of both are rounded differently there."""
    settings = [MIXED[row % len(MIXED)] for row in range(rows)]
    different = total = 0
    for seed in range(3):
        logits = randn(rows, vocab, dtype=F32) * spread
        if rounded:
            logits = logits.mul_(4).round_().div_(4)
        given = sampling(settings, seed)
        tokens, failed = sample(logits, *given)
        expected, _ = reference.sample(logits.cpu(), *(part.cpu() for part in given))
        different += int((tokens.cpu() != expected).sum())
        total += rows
        assert not failed.any(), "a sound row failed"
        best = logits.argmax(-1) if not rounded else reference.argmax(logits.cpu())[0].to(DEVICE)
        assert torch.equal(argmax(logits)[0], best), "argmax differs"
        alone = [
            sample(logits[row : row + 1], *(part[row : row + 1] for part in given))[0].item()
            for row in range(min(rows, 8))
        ]
        assert alone == tokens[:8].tolist(), "a row alone draws another token"
    assert different <= total * 0.002, f"{different} of {total} tokens differ"
    return f"{different} of {total} tokens differ"


def check_broken_rows() -> str:
    logits = randn(8, 50_000, dtype=F32)
    given = sampling(MIXED)
    clean, _ = sample(logits, *given)
    logits[2, 777], logits[4, 49_999], logits[5] = torch.nan, torch.inf, -torch.inf
    tokens, failed = sample(logits, *given)
    assert failed.tolist() == [row in (2, 4, 5) for row in range(8)], failed.tolist()
    assert argmax(logits)[1].tolist() == failed.tolist()
    sound = ~failed
    assert torch.equal(tokens[sound], clean[sound]), "a broken row changed others"
    assert bool(((tokens >= 0) & (tokens < 50_000)).all()), "outside the vocabulary"
    return "reported"


def check_graph() -> str:
    """One captured graph serves whatever the tensors hold when it is replayed."""
    logits, given = randn(8, 49_152, dtype=F32), sampling(MIXED)
    x, weight = randn(8, 576), randn(960, 576)
    sample(logits, *given)
    few_row_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample(logits, *given)
        product = few_row_linear(x, weight)
    for seed in range(4):
        settings = [MIXED[(row + seed) % len(MIXED)] for row in range(8)]
        for part, value in zip(given, sampling(settings, seed), strict=True):
            part.copy_(value)
        logits.normal_()
        x.normal_()
        graph.replay()
        assert torch.equal(tokens, sample(logits, *given)[0]), "tokens differ in a graph"
        assert torch.equal(product, few_row_linear(x, weight)), "products differ in a graph"
    return "equal"


def check_all() -> None:
    for dtype, rows, (size, depth), biased in (
        (BF16, 1, (4096, 4096), False),
        (BF16, 16, (960, 576), True),
        (F16, 33, (1000, 1544), True),
        (BF16, 64, (6144, 4096), False),
        (F32, 5, (576, 576), True),
    ):
        attempt(
            f"few_row_linear {dtype} {rows} x {size} x {depth}",
            lambda d=dtype, r=rows, s=size, k=depth, b=biased: check_linear(d, r, s, k, b),
        )
    for dtype, rows, size in ((BF16, 3, 576), (F16, 300, 4096), (F32, 7, 1000), (BF16, 1, 8192)):
        attempt(
            f"rms_norm, silu_mul {dtype} {rows} x {size}",
            lambda d=dtype, r=rows, s=size: check_norm(d, r, s),
        )
    for dtype, dim, half, normed in (
        (BF16, 128, 64, True),
        (BF16, 64, 32, False),
        (F16, 80, 40, True),
        (F32, 256, 64, False),
    ):
        attempt(
            f"rope_and_store {dtype} {dim}/{2 * half} norm {normed}",
            lambda d=dtype, w=dim, h=half, n=normed: check_rope(d, w, h, n, 37),
        )
    for dtype in (BF16, F32):
        attempt(f"move_pages {dtype}", lambda d=dtype: check_moves(d))
    for rows, vocab, spread, rounded in (
        (64, 128_256, 3.0, False),
        (16, 49_152, 1.0, False),
        (16, 151_936, 2.0, True),
        (32, 128_256, 1.0, True),
        (8, 128_256, 0.0, True),
        (8, 3_000, 2.0, False),
    ):
        attempt(
            f"sample {rows} x {vocab} spread {spread} rounded {rounded}",
            lambda r=rows, v=vocab, s=spread, q=rounded: check_sample(r, v, s, q),
        )
    attempt("broken rows", check_broken_rows)
    attempt("graph", check_graph)


def repeat(call: Callable[..., object], *given: object, times: int = 20) -> float:
    """Microseconds of one call among several in a graph."""

    def run() -> None:
        for _ in range(times):
            call(*given)

    return tune.graph_microseconds(run) / times


def time_linear() -> None:
    say("few_row_linear: us and share of the read limit; library; ratio (above 1: ours is faster)")
    for size, depth in tune.LINEAR_SHAPES:
        megabytes = size * depth * 2 / 1e6
        copies = max(2, int(256 / megabytes) + 1)
        weights = randn(copies, size, depth)
        cells = []
        for rows in (1, 8, 16, 32, 64, 128):
            x = randn(rows, depth)
            times = []
            for function in (few_row_linear, F.linear):

                def run(
                    call: Callable[..., Tensor] = function, x: Tensor = x, weights: Tensor = weights
                ) -> None:
                    for weight in weights:
                        call(x, weight)

                times.append(tune.graph_microseconds(run) / copies)
            share = (size * depth + rows * (size + depth)) * 2e-3 / times[0] / READ_LIMIT
            cells.append(
                f"T{rows} {times[0]:.1f} {share:.2f} {times[1]:.1f} {times[1] / times[0]:.2f}"
            )
        say(f"{size}x{depth} " + " | ".join(cells))


def time_elementwise() -> None:
    for name, hidden, inner, heads, kv_heads, dim in (
        ("8B", 4096, 14336, 32, 8, 128),
        ("135M", 576, 1536, 9, 3, 64),
    ):
        for rows in (1, 64, 256, 4096):
            x, residual, weight = randn(rows, hidden), randn(rows, hidden), randn(hidden)
            gate_up = randn(rows, 2 * inner)
            qkv = randn(rows, heads + 2 * kv_heads, dim)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            cos = torch.rand(rows, dim // 2, device=DEVICE)
            kv = pages_memory(2, kv_heads, 16, dim, BF16, rows // 64 + 2)
            pages = torch.arange(rows, device=DEVICE) // 16
            offsets = torch.arange(rows, device=DEVICE) % 16
            norms = randn(dim), randn(dim), 1e-6
            given = q, k, v, cos, cos, kv, 1, pages, offsets
            calls = {
                "rms_norm": (rms_norm, x, weight, 1e-5),
                "with residual": (rms_norm, x, weight, 1e-5, residual),
                "silu_mul": (silu_mul, gate_up),
                "rope_and_store": (rope_and_store, *given),
                "with norms": (rope_and_store, *given, *norms),
            }
            cells = [f"{label} {repeat(*call):.2f}" for label, call in calls.items()]
            say(f"{name} T{rows}, us: " + ", ".join(cells))


def time_sample() -> None:
    kinds = (
        ("temperature", 1.0, {}),
        ("top-k 50", 3.0, {"top_k": 50}),
        ("top-p 0.9, sharp", 3.0, {"top_p": 0.9}),
        ("top-p 0.9, flat", 1.0, {"top_p": 0.9}),
        ("both, min-p, flat", 1.0, {"top_k": 20_000, "top_p": 0.9, "min_p": 1e-3}),
        ("greedy rows", 1.0, {"temperature": 0.0}),
    )
    for vocab, rows in itertools.product((128_256, 49_152), (1, 64, 256)):
        logits = randn(rows, vocab, dtype=F32)
        cells = [f"argmax {repeat(argmax, logits, times=5):.1f}"]
        for name, spread, settings in kinds:
            given = sampling([settings] * rows)
            scaled = logits * spread
            cells.append(f"{name} {repeat(sample, scaled, *given, times=5):.1f}")
        say(f"sample {rows} x {vocab}, us: " + ", ".join(cells))


def time_moves() -> None:
    for name, layers, heads, dim in (("8B", 32, 8, 128), ("135M", 30, 3, 64)):
        kv = pages_memory(layers, heads, 16, dim, BF16, 60)
        kv.normal_()
        for count in (1, 16, 128):
            pages = torch.randperm(300, device=DEVICE, dtype=torch.int32)
            sources, targets = pages[:count], pages[128 : 128 + count]
            taken = repeat(move_pages, kv, sources, targets, times=5)
            moved = 2 * count * kv[0, 0].numel() * 2e-3 / taken
            say(f"move_pages {name} {count}: {taken:.1f} us, {moved:.0f} GB/s read and written")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    check_all()
    say(f"checked in {time.monotonic() - started:.0f} s")
    if not options.quick:
        for part in (time_linear, time_elementwise, time_sample, time_moves):
            attempt(part.__name__, lambda p=part: p() or "done")
    say(f"{time.monotonic() - started:.0f} s; failed: {failures or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
