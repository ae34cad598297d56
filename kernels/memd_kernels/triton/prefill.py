"""Causal attention of new tokens over cached and new pages, for sequences of any length.

Chooses between the kernel for every card (`prefill_portable`) and that for Hopper's warpgroups
(`prefill_hopper`), cuts the work from shapes alone and launches. Nothing here waits for the device,
so all of it may be captured in a graph whose lengths and page tables change.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from memd_kernels import launch as tables
from memd_kernels.formats import PackedPages
from memd_kernels.reference.attention import check_out
from memd_kernels.reference.pages import check_kv
from memd_kernels.sinks import Sinks, check_sinks
from memd_kernels.triton.packed_launch import check_device
from memd_kernels.triton.prefill_hopper import prefill_hopper_kernel
from memd_kernels.triton.prefill_portable import MOST_PACKED_KEYS, packed_tuple, prefill_kernel

LOG2_E = 1.4426950408889634
Variant = Literal["pointers", "tma", "hopper"]
SWIZZLE_DIM = 64  # elements of two bytes in a row of the widest swizzle


@dataclass(frozen=True)
class PrefillConfig:
    """How the work is cut.

    Attributes:
        rows: Query rows of a tile, tokens times packed heads; 128 for `hopper`.
        keys: Tokens of a tile of keys; at most page_tokens for `tma`.
        num_stages: Tiles of keys in flight.
        variant: `pointers` loads keys and values by pointers, `tma` by the bulk copy engine, of
            compute capability 9.0 and later; `hopper` is the other kernel, for 9.0 alone.
        pack: The query heads of a KV head share a tile; else each has tiles of its own.
        overlap: `hopper` keeps a tile's softmax under the product of the tile before.
        uniform: Every tile of keys is computed with masks, so that a query's bits do not depend on
            the queries it shares a tile with; not for `hopper`.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    variant: Variant = "pointers"
    pack: bool = True
    overlap: bool = True
    uniform: bool = False


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
    """Attend with the last tokens of each sequence, whose keys and values are already in the pages.

    Shapes:
        q: [T, num_heads, head_dim], rotated, the dtype of `kv`; head_dim a multiple of 8 up to 256,
            its last axis contiguous.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim],
            float16, bfloat16 or float32; page_tokens a power of two from 16 to 256.
        page_table: [S, max_pages], int32; entries past a sequence's pages are not read. One with
            `PACKED_PAGE` set names a packed page.
        query_starts: [S + 1], int32, ascending row numbers; sequence i owns rows
            `query_starts[i]:query_starts[i + 1]`, its last tokens. Rows past the last are padding.
        kv_lens: [S], int32, lengths in tokens with the new tokens; 0: its rows are padding.
        scale: factor of the scores before the softmax, positive.
        window: tokens that a token sees, itself included; None: all.
        sinks: leading tokens seen besides the window, which the Hopper kernel does not have.
        packed: packed pages that the page table may name; None: it names full ones only.
        out: as what is returned, contiguous: results go there. None: a tensor of their own.

    Returns:
        [T, num_heads, head_dim], the dtype of `q`; zeros in rows of padding. Rows before the first
        sequence's are not written. Softmax and sums are in float32.

    Raises:
        ValueError: a shape, dtype, stride or device does not match the above, or the device has no
            instructions for the page format. Contents of the tensors are not checked: nothing
            waits for the device.

    Source:
        Online softmax over tiles as in FlashAttention-2 (arXiv 2307.08691), over the pages of
        PagedAttention (arXiv 2309.06180). The kernel is our own.
    """
    check(q, kv, layer, page_table, query_starts, kv_lens, window, sinks, packed, out)
    config = default_config(q, kv, packed, portable=sinks is not None)
    return launch(
        q, kv, layer, page_table, query_starts, kv_lens, scale, window, config, sinks, packed, out
    )


def default_config(
    q: Tensor, kv: Tensor, packed: PackedPages | None = None, portable: bool = False
) -> PrefillConfig:
    """The launch for shapes alone, so that a captured graph keeps it whatever its lengths become.

    The launch tables have an entry for each variant, and `float32`, which takes pointers. So does a
    call with packed pages, whose tiles are of one page each.

    Shapes:
        q, kv, packed: as in `prefill_attention`.

    Args:
        portable: The kernel for every card is needed.
    """
    capability = tables.capability(q.device)
    variant: Variant = "pointers"
    if packed is None and not portable and hopper_fits(kv, capability):
        variant = "hopper"
    elif packed is None and capability >= (9, 0) and kv.shape[5] >= 64 and tma_fits(kv):
        variant = "tma"
    found = tables.config(
        "prefill_attention",
        capability,
        head_dim=triton.next_power_of_2(kv.shape[6]),
        format="float32" if q.dtype == torch.float32 else variant,
        rows=tables.bucket(q.shape[0] * q.shape[1]),
    )
    # Unpacking takes registers: with longer tiles they would not do.
    keys = found.block_n if packed is None else min(found.block_n, MOST_PACKED_KEYS, kv.shape[5])
    return PrefillConfig(found.block_m, keys, found.num_warps, found.num_stages, variant)


def tma_fits(kv: Tensor) -> bool:
    """Whether the bulk copy engine can address pages: as rows of head_dim elements, 32-bit numbers.

    Shapes:
        kv: as in `prefill_attention`.
    """
    head_dim = kv.shape[6]
    return (
        kv.element_size() == 2
        and head_dim in (64, 128, 256)
        and kv.data_ptr() % 16 == 0
        and all(stride % head_dim == 0 for stride in kv.stride()[:5])
        and _num_rows(kv) < 2**31
    )


def hopper_fits(kv: Tensor, capability: tuple[int, int]) -> bool:
    """Whether the Hopper kernel takes this memory on a card of this compute capability."""
    return capability == (9, 0) and kv.shape[6] in (64, 128) and tma_fits(kv)


def launch(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    config: PrefillConfig,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`prefill_attention` without its checks and with a given cut, for tuning.

    `tma_fits` or `hopper_fits` must hold where the variant is of that name; `hopper` has no sinks.
    With packed pages it must be `pointers`, and tiles no longer than a page.
    """
    num_tokens, heads, head_dim = q.shape
    if out is None:
        out = torch.empty((num_tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    group, page_tokens = heads // kv.shape[4], kv.shape[5]
    pack = group if config.pack else 1
    unit = 1 if config.variant == "pointers" else head_dim
    block_stride, page_stride, layer_stride, value_stride = (
        stride // unit for stride in kv.stride()[:4]
    )
    tensors = page_table, query_starts, kv_lens, out
    sizes = num_tokens, kv_lens.shape[0], page_table.stride(0), *q.stride()[:2]
    places = block_stride, page_stride, layer * layer_stride, value_stride
    softmax = scale * LOG2_E, window or 0
    constants = {
        "HEADS": heads,
        "GROUP": group,
        "PACK": pack,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": page_tokens,
        "PAGES_PER_BLOCK": kv.shape[1],
        "KEYS": config.keys,
        "STAGES": config.num_stages,
        "HAS_WINDOW": window is not None,
        "num_warps": config.num_warps,
    }
    # One tile more for each sequence whose start is not that of a tile, and for the padding.
    grid = num_tokens // (config.rows // pack) + kv_lens.shape[0] + 1, heads // pack
    if config.variant == "hopper":
        pieces = _pieces(kv, min(page_tokens, SWIZZLE_DIM))
        hopper = {"PIECE": pieces.block_shape[0], "OVERLAP": config.overlap}
        inputs = *tensors, *sizes, *places, *softmax
        prefill_hopper_kernel[grid](q, pieces, *inputs, **hopper, **constants)
    else:
        pages = _rows(kv, config.keys) if config.variant == "tma" else kv
        sink_q = q if sinks is None else sinks.q
        prefill_kernel[grid](
            q,
            sink_q,
            kv,
            pages,
            *tensors,
            *sizes,
            *sink_q.stride()[:2],
            *places,
            *softmax,
            0 if sinks is None else sinks.count,
            *_packed_arguments(packed, kv, layer),
            PACKED=None if packed is None else packed_tuple(packed.format, packed.memory.shape[1]),
            PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
            ROWS=config.rows,
            TMA=config.variant == "tma",
            HAS_SINKS=sinks is not None,
            UNIFORM=config.uniform,
            **constants,
        )
    return out


def _packed_arguments(
    packed: PackedPages | None, kv: Tensor, layer: int
) -> tuple[Tensor, int, int, int]:
    """Memory, strides of blocks and pages, and start of the layer, in bytes."""
    if packed is None:
        return kv, 0, 0, 0
    block_stride, page_stride, layer_stride = packed.memory.stride()[:3]
    return packed.memory, block_stride, page_stride, layer * layer_stride


def _rows(kv: Tensor, tokens: int) -> TensorDescriptor:
    """The memory as rows of head_dim elements, taken `tokens` at a time."""
    head_dim = kv.shape[6]
    return TensorDescriptor(kv, [_num_rows(kv), head_dim], [head_dim, 1], [tokens, head_dim])


def _pieces(kv: Tensor, tokens: int) -> SharedDescriptor:
    """The memory as rows of head_dim elements, of which it takes `tokens` times `SWIZZLE_DIM`."""
    head_dim = kv.shape[6]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape, block = [_num_rows(kv), head_dim], [tokens, SWIZZLE_DIM]
    return SharedDescriptor(kv, shape, [head_dim, 1], block, layout)


def _num_rows(kv: Tensor) -> int:
    """Rows of head_dim elements from the first element of `kv` to its last."""
    extent = sum((size - 1) * stride for size, stride in zip(kv.shape, kv.stride(), strict=True))
    return extent // kv.shape[6] + 1


def check(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    window: int | None,
    sinks: Sinks | None,
    packed: PackedPages | None,
    out: Tensor | None,
) -> None:
    """Raise ValueError where the arguments of `prefill_attention` do not fit."""
    check_kv(kv, layer, q)
    check_sinks(sinks, q, window)
    check_out(out, q)
    if packed is not None:
        packed.check(kv)
        check_device(packed)
    heads, page_tokens, head_dim = kv.shape[4:]
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"head_dim is {head_dim}, not a multiple of 8 up to 256")
    if page_tokens not in (16, 32, 64, 128, 256):
        raise ValueError(f"page_tokens is {page_tokens}, not a power of two from 16 to 256")
    page = (heads * page_tokens * head_dim, page_tokens * head_dim, head_dim, 1)
    if kv.stride()[3:] != page or q.stride(2) != 1:
        raise ValueError(f"strides of kv {kv.stride()} or q {q.stride()}: heads are not contiguous")
    sequences = kv_lens.numel()
    for name, tensor, shape in (
        ("kv_lens", kv_lens, (sequences,)),
        ("query_starts", query_starts, (sequences + 1,)),
        ("page_table", page_table, (sequences, page_table.shape[-1])),
    ):
        if tensor.shape != shape or tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not contiguous int32 of {shape}"
            )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself, so at least 1")
