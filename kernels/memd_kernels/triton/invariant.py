"""Products and attention whose rows are the same to the bit whatever else is in the batch.

A sum of floating-point numbers depends on its order, and fast kernels choose the order by the size
of the batch. Here tiles have one size for any number of rows, and nothing is split: a row of a
product adds up K, and a query its keys from the first on, in one order. So it does not matter
either into which chunks a prompt is cut, or whether a token is decoded or computed again with a
prompt: both take one kernel. Memory is read at less speed for it where rows are few.

Source:
    He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.formats import PackedPages
from memd_kernels.launch import LaunchConfig
from memd_kernels.plan import AttentionPlan, ChunkPlan
from memd_kernels.reference.attention import check_groups
from memd_kernels.reference.linear import check_linear
from memd_kernels.sinks import Sinks, check_sink_count
from memd_kernels.triton import decode, prefill
from memd_kernels.triton.plan import plan_decode as plan_parts

# Not of the launch tables: those may know better ones for some numbers of rows.
_HALF = LaunchConfig(num_warps=4, num_stages=3, block_m=64, block_n=64, block_k=64)
_FLOAT32 = LaunchConfig(num_warps=4, num_stages=2, block_m=32, block_n=64, block_k=32)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    x_stride,
    weight_stride,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for ROWS rows of x and BLOCK_N of the weight; neighbours share the weight's."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    known, inside = row < rows, column < N
    inputs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weights = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + k[:, None]
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for at in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(inputs, known[:, None], 0.0)  # [ROWS, BLOCK_K]
            weight = tl.load(weights, inside[None, :], 0.0)  # [BLOCK_K, BLOCK_N]
        else:
            left = at + k < K
            x = tl.load(inputs, known[:, None] & left[None, :], 0.0)
            weight = tl.load(weights, left[:, None] & inside[None, :], 0.0)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        inputs += BLOCK_K
        weights += BLOCK_K
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), known[:, None] & inside[None, :])


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `memd_kernels.reference.few_row_linear`, for any number of rows.

    The last axis of x and weight must be contiguous.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    check_linear(x, weight, bias)
    (rows, depth), size = x.shape, len(weight)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    found = _FLOAT32 if x.dtype == torch.float32 else _HALF
    _linear_kernel[triton.cdiv(rows, found.block_m), triton.cdiv(size, found.block_n)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        size,
        depth,
        HAS_BIAS=bias is not None,
        EVEN_K=depth % found.block_k == 0,
        ROWS=found.block_m,
        BLOCK_N=found.block_n,
        BLOCK_K=found.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=found.num_warps,
        num_stages=found.num_stages,
    )
    return out


def plan_decode(
    kv_lens: Tensor,
    kv: Tensor,
    num_heads: int,
    window: int | None,
    groups: Tensor | None = None,
    sinks: int = 0,
    page_table: Tensor | None = None,
    packed: PackedPages | None = None,
    shares: bool = False,
) -> ChunkPlan:
    """As `memd_kernels.reference.plan_decode`: each row is a chunk of one token.

    Raises:
        ValueError: the number of sinks does not fit the window, or shares are wanted where they
            are not measured: see `memd_kernels.triton.plan.plan_decode`.
    """
    check_sink_count(sinks, window)
    rows = len(kv_lens)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=kv_lens.device)
    if not shares:
        return ChunkPlan(starts)
    with_table = None, sinks, page_table, packed, True
    return ChunkPlan(starts, plan_parts(kv_lens, kv, num_heads, window, *with_table))


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
    shares: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `memd_kernels.reference.decode_attention`, by the kernel that prompts take.

    Shares are measured beside, by the kernel that has them.

    Raises:
        ValueError: as for `prefill_attention`, or the shares do not fit.
    """
    if not isinstance(plan, ChunkPlan):
        plan = plan_decode(kv_lens, kv, q.shape[1], window)
    if shares is not None:
        decode.decode_attention(
            q, kv, layer, page_table, kv_lens, scale, window, plan.shares, sinks, packed, shares
        )
    return prefill_attention(
        q, kv, layer, page_table, plan.query_starts, kv_lens, scale, window, sinks, packed, out
    )


def shared_prefix_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    groups: Tensor,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
) -> Tensor:
    """As `memd_kernels.reference.shared_prefix_attention`; each sequence reads its pages itself.

    Raises:
        ValueError: as for `prefill_attention`, or the groups are of another shape.
    """
    check_groups(groups)
    return decode_attention(q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `memd_kernels.triton.prefill.prefill_attention`, in one cut for all shapes.

    Raises:
        ValueError: as there.
    """
    prefill.check(q, kv, layer, page_table, query_starts, kv_lens, window, sinks, packed, out)
    return prefill.launch(
        q,
        kv,
        layer,
        page_table,
        query_starts,
        kv_lens,
        scale,
        window,
        attention_config(q, kv),
        sinks,
        packed,
        out,
    )


def attention_config(q: Tensor, kv: Tensor) -> prefill.PrefillConfig:
    """The one cut for a model and dtype.

    A tile of keys is of one page: behind a window pages are left out of the page table, whole ones,
    and tiles still begin where they did.
    """
    found = launch.config(
        "prefill_attention",
        launch.capability(q.device),
        head_dim=triton.next_power_of_2(kv.shape[6]),
        format="float32" if q.dtype == torch.float32 else "pointers",
    )
    keys = min(found.block_n, kv.shape[5])
    return prefill.PrefillConfig(
        found.block_m, keys, found.num_warps, found.num_stages, uniform=True
    )


def compile_cases() -> list[CompileCase]:
    """Products of half precision with and without a bias, and of a depth that no tile divides."""
    types = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*bf16:16"),
        "rows": "i32",
        **dict.fromkeys(("x_stride", "weight_stride", "N", "K"), "i32:16"),
    }
    wide = {name: kind.replace("bf16", "fp32") for name, kind in types.items()}
    names = ("HAS_BIAS", "EVEN_K", "ROWS", "BLOCK_N", "BLOCK_K", "PRECISION")
    return [
        CompileCase(
            _linear_kernel,
            kinds,
            dict(
                zip(
                    names,
                    (biased, even, found.block_m, found.block_n, found.block_k, precision),
                    strict=True,
                )
            ),
            num_warps=found.num_warps,
            num_stages=found.num_stages,
        )
        for kinds, found, biased, even, precision in (
            (types, _HALF, False, True, "tf32"),
            (types, _HALF, True, False, "tf32"),
            (wide, _FLOAT32, False, True, "ieee"),
        )
    ]
