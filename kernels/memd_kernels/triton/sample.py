"""Greedy choice and sampling: a vocabulary is cut into chunks, and a program has one of one row.

The largest logit of each chunk; the mass of each chunk, with a histogram of its keys where tokens
are ranked; windows of keys, from the histogram; the tokens in the windows, gathered, and sums of
what is below; the draw. Windows that did not have the keys that decide are moved, and the last two
are done again; where that fails too, the draw goes through the row. What a row does not need, its
programs skip: they see so on the device, and nothing waits for it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.reference.sample import check_logits, check_sample
from memd_kernels.triton.sample_draw import (
    NO_TOKEN,
    draw_target,
    least_weight,
    load_logits,
    row_limits,
    row_top,
    token_keys,
    token_weights,
)
from memd_kernels.triton.sample_plan import BINS, key_bins, plan_row
from memd_kernels.triton.sample_rank import SUMS, WINDOWS, draw_kernel, gather_kernel, store_windows

_ROUNDS = 2  # of gathering and drawing; the last goes through the row where windows were missed
_PROGRAMS = 8  # of a multiprocessor, that gather again


@triton.jit
def _scan_kernel(logits_ptr, most_ptr, first_ptr, stride, vocab, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + row * stride + column, column < vocab)
    most = tl.max(logits, 0)
    first = tl.min(tl.where(logits == most, column, NO_TOKEN), 0)
    broken = tl.sum((logits != logits).to(tl.int32), 0) > 0
    tl.store(most_ptr + row * chunks + chunk, tl.where(broken, float("nan"), most))
    tl.store(first_ptr + row * chunks + chunk, first)


@triton.jit
def _argmax_kernel(most_ptr, first_ptr, tokens_ptr, failed_ptr, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, token, failed = row_top(most_ptr, first_ptr, row, chunks, CHUNKS)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(failed_ptr + row, failed)


@triton.jit
def _weigh_kernel(
    logits_ptr, most_ptr, first_ptr, mass_ptr, likely_ptr, histogram_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    stride, vocab, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        top, _, failed = row_top(most_ptr, first_ptr, row, chunks, CHUNKS)
        _, _, ranked = row_limits(top_k_ptr, top_p_ptr, row, vocab)
        if not failed:
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = column < vocab
            logits = load_logits(logits_ptr + row * stride + column, inside)
            keys = token_keys(logits, top, temperature)
            weights = token_weights(keys)
            min_p = tl.load(min_p_ptr + row)
            if ranked:
                counts = tl.histogram(key_bins(keys), BINS, mask=inside)
                bins = histogram_ptr + (row * chunks + chunk) * BINS + tl.arange(0, BINS)
                tl.store(bins, counts)
                if min_p > 0:
                    likely = tl.sum(tl.where(weights >= least_weight(min_p), weights, 0), 0)
                    tl.store(likely_ptr + row * chunks + chunk, likely)
            else:
                least = least_weight(tl.minimum(min_p, 1.0))
                weights = tl.where(weights >= least, weights, 0)
            tl.store(mass_ptr + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit
def _draw_by_id(
    logits_ptr, masses, min_p, seed, position, top, temperature, vocab, CHUNK: tl.constexpr
):
    """Invert the distribution of the tokens by id: find the chunk, then the token in it."""
    target = draw_target(seed, position, tl.sum(masses, 0))
    passed = tl.cumsum(masses, 0) <= target
    chunk = tl.sum(passed.to(tl.int32), 0)
    target -= tl.sum(tl.where(passed, masses, 0), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = load_logits(logits_ptr + column, column < vocab)
    keys = token_keys(logits, top, temperature)
    weights = token_weights(keys)
    weights = tl.where(weights >= least_weight(tl.minimum(min_p, 1.0)), weights, 0)
    return chunk * CHUNK + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)


@triton.jit
def _settle_kernel(
    logits_ptr, most_ptr, first_ptr, mass_ptr, likely_ptr, histogram_ptr,
    windows_ptr, sums_ptr, waiting_ptr,
    seeds_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    tokens_ptr, failed_ptr,
    stride, vocab, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The token of a row whose tokens are not ranked; the first windows of others."""
    row = tl.program_id(0).to(tl.int64)
    top, token, failed = row_top(most_ptr, first_ptr, row, chunks, CHUNKS)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, ranked = row_limits(top_k_ptr, top_p_ptr, row, vocab)
    drawn = (temperature > 0) & (failed == 0)
    if drawn:
        chunk = tl.arange(0, CHUNKS)
        masses = tl.load(mass_ptr + row * chunks + chunk, chunk < chunks, 0)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        if ranked:
            measured = chunk < tl.where(min_p > 0, chunks, 0)
            likely = tl.sum(tl.load(likely_ptr + row * chunks + chunk, measured, 0), 0)
            counts = tl.zeros((32, BINS), tl.int32)
            for start in range(0, chunks, 32):
                at = start + tl.arange(0, 32)[:, None]
                source = histogram_ptr + (row * chunks + at) * BINS + tl.arange(0, BINS)[None, :]
                counts += tl.load(source, at < chunks, 0)
            limits = top_k, top_p, min_p
            windows = plan_row(
                tl.sum(counts, 0), tl.sum(masses, 0), likely, seed, position, limits, vocab, LIMIT
            )
            store_windows(windows_ptr, sums_ptr, row, windows)
        else:
            token = _draw_by_id(
                logits_ptr + row * stride, masses, min_p, seed, position, top, temperature, vocab,
                CHUNK,
            )  # fmt: skip
    tl.store(waiting_ptr + row, (drawn & ranked).to(tl.int32))
    tl.store(tokens_ptr + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(failed_ptr + row, failed)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `memd_kernels.reference.argmax`, in two launches; the last axis must be contiguous.

    Raises:
        ValueError: the shape or dtype does not fit.
    """
    check_logits(logits)
    rows = len(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        most, first, _ = _scan(logits)
        _argmax_kernel[(rows,)](
            most,
            first,
            tokens,
            failed,
            most.shape[1],
            CHUNKS=triton.next_power_of_2(most.shape[1]),
        )
    return tokens, failed


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `memd_kernels.reference.sample`, in seven launches that no setting changes.

    The last axis of the logits must be contiguous, and all others. A batch that is greedy
    throughout is served by `argmax`, at two.

    Raises:
        ValueError: a shape or dtype does not fit.

    Notes:
        Uniform numbers, scaled logits and ties are the reference's to the bit. Weights are the
        exponentials rounded down to multiples of 2**-40 of the largest, and may differ from the
        reference's in the last bits of float32: a draw that comes within about 1e-6 of the boundary
        between two tokens, or a token as near to a limit of top-p or min-p, can fall on the other
        side. A token less likely than 2**-40 of the largest is never drawn. A row's result does not
        depend on the batch.
    """
    check_sample(logits, seeds, positions, temperature, top_k, top_p, min_p)
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    failed = torch.empty(rows, dtype=torch.bool, device=device)
    if not rows:
        return tokens, failed
    given = seeds, positions, temperature, top_k, top_p, min_p
    most, first, scan = _scan(logits)
    source = logits, most, first
    sizes = logits.stride(0), vocab, most.shape[1]
    draw = launch.config("sample", launch.capability(device))
    masses, state = _settle(source, given, tokens, failed, sizes, scan, draw.block_n)
    _rank(source, given, tokens, masses, state, sizes, scan, draw)
    return tokens, failed


def _settle(
    source: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    tokens: Tensor,
    failed: Tensor,
    sizes: tuple[int, int, int],
    scan: launch.LaunchConfig,
    limit: int,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weigh all rows and draw what needs no ranking; the masses, and the state of other rows."""
    rows, chunks, device = len(tokens), sizes[2], tokens.device
    mass = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    likely = torch.empty_like(mass)
    histogram = torch.empty(rows, chunks, BINS.value, dtype=torch.int32, device=device)
    windows = torch.empty(rows, 2 * WINDOWS.value, dtype=torch.int32, device=device)
    sums = torch.empty(rows, SUMS.value, dtype=torch.int64, device=device)
    waiting = torch.empty(rows, dtype=torch.int32, device=device)
    blocks = {
        "CHUNK": scan.block_n,
        "CHUNKS": triton.next_power_of_2(chunks),
        "num_warps": scan.num_warps,
    }
    _weigh_kernel[(rows, chunks)](*source, mass, likely, histogram, *given[2:], *sizes, **blocks)
    _settle_kernel[(rows,)](
        *source, mass, likely, histogram, windows, sums, waiting, *given, tokens, failed, *sizes,
        **blocks, LIMIT=limit,
    )  # fmt: skip
    return (mass, likely), (windows, sums, waiting)


def _rank(
    source: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    tokens: Tensor,
    masses: tuple[Tensor, ...],
    state: tuple[Tensor, ...],
    sizes: tuple[int, int, int],
    scan: launch.LaunchConfig,
    draw: launch.LaunchConfig,
) -> None:
    """Draw for the rows that wait."""
    rows, chunks, device = len(tokens), sizes[2], tokens.device
    keys = torch.empty(rows, draw.block_n, dtype=torch.int32, device=device)
    ids = torch.empty_like(keys)
    blocks = {"CHUNKS": triton.next_power_of_2(chunks), "LIMIT": draw.block_n}
    warps = max(1, min(scan.block_n // 256, 16))  # few registers, for more programs at once
    shares = triton.cdiv(_PROGRAMS * launch.multiprocessors(device), rows)
    for again in range(_ROUNDS):
        gather_kernel[(rows, min(shares, chunks) if again else chunks)](
            *source, *state, keys, ids, given[2], *sizes,
            **blocks, CHUNK=scan.block_n, SHARED=again > 0, num_warps=warps,
        )  # fmt: skip
        draw_kernel[(rows,)](
            *source, *masses, *state, keys, ids, *given, tokens, *sizes,
            **blocks, LAST=again == _ROUNDS - 1, num_warps=draw.num_warps,
        )  # fmt: skip


def _scan(logits: Tensor) -> tuple[Tensor, Tensor, launch.LaunchConfig]:
    """Largest logit and its lowest id, each [R, chunks], and the launch with the chunks' size."""
    rows, vocab = logits.shape
    bucket = launch.bucket(rows)
    found = launch.config("sample_scan", launch.capability(logits.device), rows=bucket)
    chunks = triton.cdiv(vocab, found.block_n)
    most = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    first = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _scan_kernel[(rows, chunks)](
        logits,
        most,
        first,
        logits.stride(0),
        vocab,
        chunks,
        CHUNK=found.block_n,
        num_warps=found.num_warps,
    )
    return most, first, found


def compile_cases() -> list[CompileCase]:
    """The kernels for a large vocabulary."""
    kinds = {
        "logits": "*bf16:16", "most": "*fp32:16", "first": "*i32:16", "mass": "*i64:16",
        "likely": "*i64:16", "histogram": "*i32:16", "windows": "*i32:16", "sums": "*i64:16",
        "waiting": "*i32:16", "keys": "*i32:16", "ids": "*i32:16", "seeds": "*i64:16",
        "positions": "*i64:16", "temperature": "*fp32:16", "top_k": "*i64:16",
        "top_p": "*fp32:16", "min_p": "*fp32:16", "tokens": "*i64:16", "failed": "*i1:16",
    }  # fmt: skip
    types = {f"{name}_ptr": kind for name, kind in kinds.items()}
    types |= {"stride": "i32:16", "vocab": "i32:16", "chunks": "i32"}
    kernels: list[tuple[Any, int, dict[str, bool]]] = [
        (_scan_kernel, 8, {}),
        (_argmax_kernel, 4, {}),
        (_weigh_kernel, 8, {}),
        (_settle_kernel, 8, {}),
    ]
    for again in (False, True):
        kernels.append((gather_kernel, 16, {"SHARED": again}))
        kernels.append((draw_kernel, 16, {"LAST": again}))
    cases = []
    for kernel, warps, choice in kernels:
        sizes = {"CHUNK": 4096, "CHUNKS": 32, "LIMIT": 16384, **choice}
        names = kernel.arg_names
        cases.append(
            CompileCase(
                kernel,
                {name: kind for name, kind in types.items() if name in names},
                {name: size for name, size in sizes.items() if name in names},
                num_warps=warps,
            )
        )
    return cases
