"""Products of a few rows with a weight matrix, at the speed at which the weights can be read.

Rows of the weight are the tensor cores' long side and the few rows of x their short one. Where the
weight has too few rows to fill the card, K is split: each split leaves its sums in a scratch, and
the last of a tile's programs to arrive adds them up in order, so results are the same every time.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.reference.linear import check_linear
from memd_kernels.triton.overlap import overlapped, prefetch, wait_for_previous

MOST_ROWS = 64
MOST_TILES = 1 << 16
LINE = tl.constexpr(64)  # elements of a cache line of half precision
LINES = tl.constexpr(4)  # of each row of the weight, that are asked for ahead
_LIBRARY = "library"  # variant of a launch table: the vendor's library is faster


@triton.jit(do_not_specialize=["rows", "splits"])
def _few_row_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,  # [splits, rows of x, N] float32
    arrived_ptr,  # [tiles] int32, zero before and after
    rows,
    x_stride,
    weight_stride,
    N,
    K,
    split_size,  # of K, a multiple of BLOCK_K
    splits,
    SPLIT: tl.constexpr,  # more than one
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for BLOCK_N rows of the weight and one split of K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    inside = column < N
    start = split * split_size
    k = start + tl.arange(0, BLOCK_K)
    weights = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + k[None, :]
    inputs = x_ptr + row[None, :] * x_stride + k[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    if OVERLAP:
        # Weights are nobody's result: they come into the second cache while others end.
        line = start + tl.arange(0, LINES) * LINE
        there = inside[:, None] & (line < tl.minimum(start + split_size, K))[None, :]
        first = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + line[None, :]
        prefetch(tl.where(there, first, weight_ptr))
    wait_for_previous(OVERLAP)
    for at in range(start, tl.minimum(start + split_size, K), BLOCK_K):
        if EVEN_K and EVEN_N:
            weight = tl.load(weights, eviction_policy="evict_first")  # [BLOCK_N, BLOCK_K]
        elif EVEN_K:
            weight = tl.load(weights, inside[:, None], 0.0, eviction_policy="evict_first")
        else:
            mask = inside[:, None] & (at + tl.arange(0, BLOCK_K) < K)[None, :]
            weight = tl.load(weights, mask, 0.0, eviction_policy="evict_first")
        if EVEN_K:
            x = tl.load(inputs, row[None, :] < rows, 0.0)  # [BLOCK_K, ROWS]
        else:
            mask = (row < rows)[None, :] & (at + tl.arange(0, BLOCK_K) < K)[:, None]
            x = tl.load(inputs, mask, 0.0)
        sums = tl.dot(weight, x, sums, input_precision=PRECISION)
        weights += BLOCK_K
        inputs += BLOCK_K
    mask = inside[:, None] & (row < rows)[None, :]
    place = row[None, :] * N + column[:, None]
    if SPLIT:
        tl.store(sums_ptr + split * rows * N + place, sums, mask, cache_modifier=".cg")
        tl.debug_barrier()  # the program's sums are out before it is counted
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for part in range(splits):
                source = sums_ptr + part * rows * N + place
                sums += tl.load(source, mask, 0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    else:
        last = True
    if last:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask)


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `memd_kernels.reference.few_row_linear`; the last axis of x and weight must be contiguous.

    More than MOST_ROWS rows, and shapes for which the launch table says so, go to the library.

    Raises:
        ValueError: a shape or dtype does not fit.

    Notes:
        Calls on one device share the counters of their splits: they must not run at the same time,
        on two streams. The first call on a device must come before the capture of a graph.
    """
    check_linear(x, weight, bias)
    if not 0 < len(x) <= MOST_ROWS:
        return F.linear(x, weight, bias)
    found = _find(x, len(weight))
    if found.variant == _LIBRARY:
        return F.linear(x, weight, bias)
    return launch_linear(x, weight, bias, found)


def launch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, found: launch.LaunchConfig
) -> Tensor:
    """The kernel with a given launch: at most MOST_ROWS rows; `splits` 0: as many as fill the card.

    Not checked; for `few_row_linear` and the tuner.
    """
    (rows, depth), size = x.shape, len(weight)
    tiles = triton.cdiv(size, found.block_n)
    steps = triton.cdiv(depth, found.block_k)
    splits = found.splits or _fill(launch.multiprocessors(x.device), tiles)
    if tiles > MOST_TILES:
        splits = 1
    split_steps = triton.cdiv(steps, min(splits, steps))
    splits = triton.cdiv(steps, split_steps)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    sums = out if splits == 1 else torch.empty(splits, rows, size, device=x.device)
    _few_row_linear_kernel[(tiles, splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        sums,
        _arrived(x.device),
        rows,
        x.stride(0),
        weight.stride(0),
        size,
        depth,
        split_steps * found.block_k,
        splits,
        SPLIT=splits > 1,
        HAS_BIAS=bias is not None,
        EVEN_K=depth % found.block_k == 0,
        EVEN_N=size % found.block_n == 0,
        ROWS=max(16, launch.bucket(rows)),
        BLOCK_N=found.block_n,
        BLOCK_K=found.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=found.num_warps,
        num_stages=found.num_stages,
        **overlapped(x.device),
    )
    return out


def _find(x: Tensor, size: int) -> launch.LaunchConfig:
    return launch.config(
        "few_row_linear",
        launch.capability(x.device),
        format="float32" if x.dtype == torch.float32 else "half",
        rows=max(16, launch.bucket(len(x))),
        size=size,
        depth=x.shape[1],
    )


def _fill(multiprocessors: int, tiles: int) -> int:
    """Splits that give each multiprocessor about two programs; no splits from one program each."""
    return 1 if tiles >= multiprocessors else max(1, 2 * multiprocessors // tiles)


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def compile_cases() -> list[CompileCase]:
    """Launches of the tables, with and without splits, and the shapes of a small model."""
    types = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16:16"),
        "sums_ptr": "*fp32:16",
        "arrived_ptr": "*i32:16",
        "rows": "i32",
        "splits": "i32",
        **dict.fromkeys(("x_stride", "weight_stride", "N", "K", "split_size"), "i32:16"),
    }
    names = ("SPLIT", "HAS_BIAS", "EVEN_K", "EVEN_N", "ROWS", "BLOCK_N", "BLOCK_K")
    return [
        CompileCase(
            _few_row_linear_kernel,
            types,
            dict(zip(names, values, strict=True)) | {"PRECISION": "tf32"},
            num_warps=4,
            num_stages=stages,
        )
        for *values, stages in (
            (False, False, True, True, 16, 64, 128, 5),
            (True, False, True, True, 16, 64, 128, 5),
            (True, True, False, False, 64, 64, 128, 4),
        )
    ]
