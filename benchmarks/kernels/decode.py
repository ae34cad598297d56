"""Decode attention on a GPU: right against the reference, then how fast.

    PYTHONPATH=.:kernels python benchmarks/kernels/decode.py [--quick] [--seconds 150]

Times are medians of replays of a CUDA graph that runs the kernel over several layers in turn, so
that a layer's keys and values have left the second cache before it comes again. `--quick` checks
only. Ends with 1 if a result is wrong or a case fails.
"""

import argparse
import itertools
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from decode_batch import (
    DEVICE,
    Batch,
    Run,
    layers_for,
    make_batch,
    measure,
    say,
    share,
    use,
)
from memd_kernels import reference
from memd_kernels.launch import LaunchConfig
from memd_kernels.triton.shared_prefix import shared_prefix_attention
from torch import Tensor

READ_LIMIT = 4573  # GB/s, the best that was measured on an H200
ANCHORS = (
    (1, 32768),
    (1, 131072),
    (8, 8192),
    (32, 4096),
    (64, 8192),
    (128, 2048),
    (256, 1024),
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def expect(batch: Batch, window: int | None = None) -> Tensor:
    """The reference in float32, of contents as they are."""
    kv = batch.kv[:, :, -1:].float()
    return reference.decode_attention(
        batch.q.float(), kv, 0, batch.table, batch.lens, batch.scale, window
    )


def check(out: Tensor, batch: Batch, window: int | None = None) -> str:
    error = relative(out, expect(batch, window))
    if not error < TOLERANCE[out.dtype]:
        raise AssertionError(f"error {error:.2e}")
    return f"error {error:.1e}"


def check_decode(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int, window: int | None
) -> str:
    lens = [1, 0, 700, 65, 8191, 64, 3000, 129]
    batch = make_batch(
        lens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page_tokens=page,
        layers=2,
        dtype=dtype,
        spoil=True,
    )
    plan = batch.plan(window)
    out = batch.decode(1, plan, window)
    if out[1].any():
        raise AssertionError("padding is not zeros")
    said = check(out, batch, window)
    for _ in range(100):  # whoever comes last, the bits are the same
        if not torch.equal(batch.decode(1, plan, window), out):
            raise AssertionError("bits differ from run to run")
    return said


def check_graph() -> str:
    most = [4000, 900, 64, 30000]
    batch = make_batch(most)
    graph = torch.cuda.CUDAGraph()
    batch.decode(0, None)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = batch.decode(0, None)
    said = ""
    for lens in ([400, 1, 0, 300], [7, 900, 64, 29000], most):
        batch.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        said = check(out, batch)
    return said


def check_shared(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> str:
    lens = [2100 + 37 * row for row in range(40)] + [900, 77, 0, 1500, 1501]
    batch = make_batch(lens, heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=dtype, spoil=True)
    groups = share(batch, [[0, 40, 32], [0, 0, 0], [43, 2, 20]])
    plan = batch.plan(window, groups)

    def run() -> Tensor:
        return shared_prefix_attention(
            batch.q, batch.kv, 0, batch.table, batch.lens, groups, batch.scale, window, plan
        )

    out = run()
    said = check(out, batch, window)
    for _ in range(50):
        if not torch.equal(run(), out):
            raise AssertionError("bits differ from run to run")
    return said


def check_all(run: Run) -> None:
    half, bf16, full = torch.float16, torch.bfloat16, torch.float32
    for case in (
        (bf16, 32, 8, 128, 64, None),
        (bf16, 32, 8, 128, 16, None),
        (bf16, 32, 8, 128, 256, 1000),
        (half, 9, 3, 64, 32, None),
        (half, 8, 8, 80, 64, 100),
        (bf16, 16, 1, 256, 128, None),
        (full, 8, 2, 128, 64, None),
    ):
        run.case(f"check decode {case}", lambda case=case: check_decode(*case))
    run.case("check graph", check_graph)
    for shared in ((bf16, 32, 8, 128, None), (half, 9, 3, 64, 700), (full, 8, 2, 64, None)):
        run.case(f"check shared {shared}", lambda shared=shared: check_shared(*shared))


def bandwidth(tokens: int, token_bytes: int, microseconds: float) -> str:
    rate = tokens * token_bytes / microseconds / 1e3
    return f"{rate:5.0f} GB/s {rate / READ_LIMIT:.2f}"


def time_decode(rows: int, context: int, page: int, heads: int, kv_heads: int, dim: int) -> str:
    token_bytes = 4 * kv_heads * dim
    layers = layers_for(rows * context, token_bytes)
    batch = make_batch(
        [context] * rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page_tokens=page,
        layers=layers,
    )
    plan = batch.plan()
    median, spread = measure(partial(batch.decode, plan=plan), layers)
    return f"{median:7.1f} ±{spread:.1f} us {bandwidth(rows * context, token_bytes, median)}"


def time_pages(run: Run) -> None:
    for page, (rows, context) in itertools.product((64, 16, 32, 128, 256), ANCHORS):
        name = f"decode page {page} {rows}x{context}"
        run.case(name, lambda a=(rows, context, page): time_decode(*a, 32, 8, 128))
    for rows in (1, 64, 256):
        run.case(f"decode 9/3x64 {rows}x512", lambda r=rows: time_decode(r, 512, 64, 9, 3, 64))


def time_others(run: Run) -> None:
    """What else a step does or could do: the plan, a ragged batch, torch's own attention."""

    def plans(rows: int) -> str:
        batch = make_batch([512] * rows)
        median, spread = measure(lambda _: batch.plan(), 20)
        return f"{median:.1f} ±{spread:.1f} us"

    def ragged() -> str:
        lens = [131072] + [100 + row for row in range(255)]
        batch = make_batch(lens, layers=3)
        plan = batch.plan()
        median, spread = measure(partial(batch.decode, plan=plan), 3)
        return f"{median:.1f} ±{spread:.1f} us {bandwidth(sum(lens), 4096, median)}"

    def peer(rows: int, context: int) -> str:
        layers = layers_for(rows * context, 4096)
        shape = (layers, 2, rows, 8, context, 128)
        kv = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
        q = torch.empty(rows, 32, 1, 128, dtype=torch.bfloat16, device=DEVICE).normal_()

        def attend(layer: int) -> Tensor:
            keys, values = kv[layer]
            return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

        median, spread = measure(attend, layers)
        return f"{median:.1f} ±{spread:.1f} us"

    for rows in (1, 64, 256, 1024):
        run.case(f"plan {rows} rows", lambda rows=rows: plans(rows))
    run.case("ragged 1x131072 + 255 short", ragged)
    for rows, context in ((1, 32768), (32, 4096), (256, 1024)):
        run.case(f"torch SDPA {rows}x{context}", lambda a=(rows, context): peer(*a))


def shared_batch() -> tuple[Batch, Tensor]:
    batch = make_batch([8192 + 256] * 64, layers=4)
    return batch, share(batch, [[0, 64, 8192 // 64]])


def time_shared(run: Run) -> None:
    """64 x (8k shared + 256 own), against plain decode on the same pages."""
    batch, groups = shared_batch()

    def shared(config: LaunchConfig | None) -> str:
        use("shared_prefix_attention", config)
        plan = batch.plan(None, groups)
        arguments = (batch.table, batch.lens, groups, batch.scale, None, plan)
        median, spread = measure(
            lambda layer: shared_prefix_attention(batch.q, batch.kv, layer, *arguments), 4
        )
        return f"{median:.1f} ±{spread:.1f} us"

    def plain() -> str:
        plan = batch.plan()
        median, spread = measure(partial(batch.decode, plan=plan), 4)
        return f"{median:.1f} ±{spread:.1f} us"

    run.case("64x(8k+256) plain decode", plain)
    run.case("64x(8k+256) as tables say", lambda: shared(None))
    for rows, tile, warps, stages, splits in (
        *itertools.product((64,), (64,), (4,), (2, 3, 4), (1, 2, 3, 4)),
        (64, 128, 4, 2, 1),
        (128, 64, 8, 3, 1),
        (128, 64, 8, 2, 2),
        (128, 128, 8, 2, 1),
        (64, 32, 4, 4, 2),
    ):
        if run.left() < 5:
            say("shared sweep cut short")
            break
        config = LaunchConfig(warps, stages, rows, tile, splits=splits)
        name = f"64x(8k+256) rows {rows} tile {tile} warps {warps} stages {stages} splits {splits}"
        run.case(name, lambda config=config: shared(config))
    use("shared_prefix_attention", None)


def sweep(run: Run, reserve: float) -> None:
    """The best launches of each anchor over pages of 64; the likelier launches come first."""
    launches = (
        *((2, 64, 3), (1, 64, 3), (2, 64, 4), (2, 64, 2), (1, 32, 4), (1, 64, 2)),
        *((2, 32, 4), (4, 64, 3), (2, 32, 6), (1, 64, 4), (4, 64, 4), (4, 128, 3), (2, 128, 2)),
    )
    found: dict[tuple[int, int], list[tuple[float, str]]] = {}
    batches = {
        anchor: make_batch([anchor[1]] * anchor[0], layers=layers_for(anchor[0] * anchor[1], 4096))
        for anchor in ANCHORS
    }
    refused = set()
    for (warps, tile, stages), splits, (anchor, batch) in itertools.product(
        launches, (2, 3, 4, 6, 8, 12), batches.items()
    ):
        name = f"w{warps} t{tile} s{stages}"
        if run.left() < reserve:
            say(f"sweep cut short at {name}")
            break
        if name in refused:
            continue
        use("decode_attention", LaunchConfig(warps, stages, block_n=tile, splits=splits))
        try:
            attend = partial(batch.decode, plan=batch.plan())
            median, _ = measure(attend, batch.layers, replays=7)
        except Exception as error:
            refused.add(name)
            say("sweep", name, type(error).__name__, str(error)[:80])
            continue
        found.setdefault(anchor, []).append((median, f"{name} x{splits}"))
    use("decode_attention", None)
    for (rows, context), results in found.items():
        results.sort()
        best = "; ".join(f"{us:.1f} {name}" for us, name in results[:8])
        say(f"sweep {rows}x{context}: {len(results)} launches; {best}; worst {results[-1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="check only")
    parser.add_argument("--seconds", type=float, default=150, help="end by then")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    run = Run(options.seconds)
    started = time.monotonic()
    check_all(run)
    say(f"checks took {time.monotonic() - started:.0f} s")
    if not options.quick:
        for part in (time_pages, time_others, time_shared):
            part(run)
            say(f"{part.__name__} ended after {time.monotonic() - started:.0f} s")
        sweep(run, reserve=5)
    say(f"{run.failed} failed, {time.monotonic() - started:.0f} s")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
