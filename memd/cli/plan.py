"""`memd plan`: what fits into how much memory, before anything is loaded."""

import mmap
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memd.automatic import ELEMENT_BYTES, Device, dtype_for, page_tokens_for
from memd.cli.common import Format, FormatOption, emit, print_fields
from memd.machine import free_gpu_bytes, free_host_bytes, has_nvidia_driver
from memd.types import KVFormat

if TYPE_CHECKING:
    from memd.models.config import ModelConfig
    from memd.pool.bounds import SequenceBounds
    from memd.pool.layout import KVLayout

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

GRANULE_BYTES = {
    "cpu": mmap.PAGESIZE,
    "cuda": 2 << 20,
}  # the drivers', which need torch to be asked


def plan(
    model: Annotated[
        str, typer.Argument(help="Directory (config.json is enough), GGUF file, hub or demo name.")
    ],
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="For the pool: 24GB. Default: 80% of what weights leave."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="auto: cuda where there is an NVIDIA driver."),
    ] = "auto",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and KV.")] = "auto",
    page_tokens: Annotated[
        int | None, typer.Option("--page-tokens", min=1, max=256, help="Default: as the engine.")
    ] = None,
    kv_format: Annotated[
        KVFormat,
        typer.Option("--kv-format", help="Of pages, as kv.format; else as by default."),
    ] = "full",
    block_size: Annotated[str, typer.Option("--block-size", help="About this.")] = "16MB",
    disk: Annotated[
        str | None, typer.Option("--disk", help="For the disk tier (memory.disk.limit): 50GB.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Tokens of each sequence. Default: 4096 or less."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", min=1, help="kv.window. Default: as the model asks."),
    ] = None,
    sinks: Annotated[
        int, typer.Option("--sinks", min=0, help="kv.sinks, beside a window or budget.")
    ] = 4,
    budget: Annotated[
        int | None, typer.Option("--budget", min=1, help="kv.budget, tokens of each sequence.")
    ] = None,
    shared_heads: Annotated[
        Path | None,
        typer.Option("--shared-heads", help="Plan of `memd analyse-heads`, as if served with it."),
    ] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """How pages, blocks and sequences of a model fit into memory, from its config alone."""
    from memd.models.head_plan import read_plan
    from memd.models.hub import read_config, resolve
    from memd.pool.layout import plan_layout

    config = read_config(resolve(model))
    if shared_heads is not None:
        config = read_plan(shared_heads).config(config)
    if device == "auto":
        device = "cuda" if has_nvidia_driver() else "cpu"
    chosen = dtype_for(config.dtype, device) if dtype == "auto" else dtype
    weights_bytes = count_parameters(config) * ELEMENT_BYTES[chosen]
    tokens = page_tokens or page_tokens_for(device, packed=kv_format != "full")
    layout = plan_layout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        element_bytes=ELEMENT_BYTES[chosen],
        page_tokens=tokens,
        granule_bytes=GRANULE_BYTES[device],
        target_block_bytes=_size(block_size, "--block-size"),
        packed_page_bytes=_packed_page_bytes(kv_format, tokens, config),
    )
    facts = {
        "model": model,
        "device": device,
        "dtype": chosen,
        "kv_format": kv_format,
        "weights_bytes": weights_bytes,
        **_memory(memory, device, weights_bytes),
        **_layout_facts(layout),
    }
    bounds = _bounds(layout, config, window, sinks, budget)
    facts |= fit(bounds, facts["memory_bytes"], config.max_position, context)
    if disk is not None:
        facts |= disk_fit(layout, _size(disk, "--disk"))
    emit(facts, fmt, lambda: print_fields(facts))


def fit(
    bounds: "SequenceBounds", pool_bytes: int, max_position: int, context_tokens: int | None
) -> dict[str, Any]:
    """What a pool of `pool_bytes` holds.

    Args:
        bounds: Of each sequence, over the layout of the model's KV.
        pool_bytes: Used in whole blocks; less than one block still gives its pages.
        max_position: The model's longest context, tokens.
        context_tokens: Length of the sequences that are counted; None: 4096, or the longest.

    Returns:
        Capacity in blocks and full pages, the tokens of one sequence that fills it, the longest
        context that model and pool allow, what bounds a sequence (None: nothing), the pages that
        one of `context_tokens` holds at most, and how many of them are held at once.
    """
    layout = bounds.layout
    pages = pool_bytes // layout.block_bytes * layout.pages_per_block
    pages = pages or min(pool_bytes // layout.page_bytes, layout.pages_per_block)
    blocks = -(-pages // layout.pages_per_block)
    counted = context_tokens or min(4096, max_position)
    # Behind a window only distances within it count, not how long the text is.
    endless = bounds.window is not None and bounds.window + bounds.sinks <= max_position
    peak_pages, whole = bounds.peak_pages(counted), bounds.peak_pages(max_position) <= pages
    tokens, sequences = pages * layout.page_tokens, pages // peak_pages
    longest = max_position if whole else min(max_position, tokens)
    if bounds.packing is not None:
        most = blocks * layout.packed_pages_per_block
        tokens = _most(most * layout.page_tokens, lambda n: _blocks(bounds, n, 1) <= blocks)
        if bounds.window is None:
            longest = min(max_position, tokens)
            sequences = _most(most, lambda count: _blocks(bounds, counted, count) <= blocks)
    return {
        "pool_blocks": blocks,
        "pool_pages": pages,
        "pool_tokens": tokens,
        "model_context_tokens": max_position,
        "longest_context_tokens": longest,
        "window_tokens": bounds.window,
        "budget_tokens": None if bounds.budget is None else bounds.budget.tokens,
        "context_tokens": counted,
        "pages_of_context": peak_pages,
        "sequences_of_context": sequences if counted <= max_position or endless else 0,
    }


def _bounds(
    layout: "KVLayout", config: "ModelConfig", window: int | None, sinks: int, budget: int | None
) -> "SequenceBounds":
    """What bounds a sequence, as an engine with these settings would have it.

    Where pages are packed, they are as by default: all but the first and the last 128 tokens.
    """
    from memd.config_kv import KvSettings
    from memd.models.spans import narrowed, widest
    from memd.pool.bounds import SequenceBounds
    from memd.pool.budget import Budget
    from memd.pool.packing import PackingSchedule

    if budget is None:
        packing, kv = None, KvSettings()
        if layout.packed_page_bytes is not None:
            kept = kv.full_precision_tokens, kv.recent_tokens
            packing = PackingSchedule(layout.page_tokens, *kept)
        spans = widest(narrowed(config, window, sinks))
        return SequenceBounds(layout, *spans, packing=packing)
    owner = "--window" if window is not None else None
    owner = "a window of the model's own" if owner is None and any(config.windows) else owner
    owner = "--kv-format" if layout.packed_page_bytes is not None else owner
    if owner is not None:
        raise typer.BadParameter(f"not together with {owner}", param_hint="--budget")
    pages, sink_pages = budget // layout.page_tokens, layout.pages_for(sinks)
    try:
        bound = Budget(pages, sink_pages, "recency", layout.page_tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from None
    return SequenceBounds(layout, None, sinks, bound)


def _blocks(bounds: "SequenceBounds", num_tokens: int, count: int) -> int:
    """Blocks that hold `count` sequences of a length, as far as they can be packed."""
    layout, packing = bounds.layout, bounds.packing
    packed = 0 if packing is None else len(packing.packed_pages(num_tokens))
    full = layout.pages_for(num_tokens) - packed
    return -(-count * full // layout.pages_per_block) + -(
        -count * packed // layout.packed_pages_per_block
    )


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to a limit that fits, of those from 1 on."""
    return bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def _packed_page_bytes(form: KVFormat, page_tokens: int, config: "ModelConfig") -> int | None:
    if form == "full":
        return None
    from memd_kernels.formats import PackedFormat

    try:
        packed = PackedFormat(form, page_tokens, config.head_dim)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-format") from None
    return packed.page_bytes(config.num_layers, config.num_kv_heads)


def disk_fit(layout: "KVLayout", limit_bytes: int) -> dict[str, Any]:
    """What a disk tier of `limit_bytes` holds.

    Returns:
        Full pages, packed pages (None: there are none), and tokens in the smaller of these.
    """
    from memd.pool.disk_index import DiskIndex
    from memd.tiers.page_files import file_bytes

    sizes = [file_bytes(layout.page_tokens, layout.size_bytes(packed)) for packed in (False, True)]
    index = DiskIndex(sizes[0], limit_bytes, sizes[1])
    pages = index.capacity_pages()
    packed_pages = index.capacity_pages(packed=True) if layout.packed_page_bytes else None
    return {
        "disk_bytes": limit_bytes,
        "disk_pages": pages,
        "disk_packed_pages": packed_pages,
        "disk_tokens": (packed_pages or pages) * layout.page_tokens,
    }


def count_parameters(config: "ModelConfig") -> int:
    """Weights of a Llama-type decoder, norms and biases included."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    attention += config.attention_bias * head_dim * (heads + 2 * kv_heads)
    attention += config.output_bias * hidden + config.qk_norm * 2 * head_dim
    mlp = 3 * hidden * config.intermediate_size
    mlp += config.mlp_bias * (2 * config.intermediate_size + hidden)
    embeddings = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return embeddings + config.num_layers * (attention + mlp + 2 * hidden) + hidden


def _layout_facts(layout: "KVLayout") -> dict[str, Any]:
    return {
        "token_bytes": layout.token_bytes,
        "page_tokens": layout.page_tokens,
        "page_bytes": layout.page_bytes,
        "block_bytes": layout.block_bytes,
        "pages_per_block": layout.pages_per_block,
        **_packed_facts(layout),
        "block_waste_bytes": layout.waste_bytes,
        "block_waste_share": layout.waste_bytes / layout.block_bytes,
    }


def _packed_facts(layout: "KVLayout") -> dict[str, Any]:
    if layout.packed_page_bytes is None:
        return {}
    return {
        "packed_page_bytes": layout.packed_page_bytes,
        "packed_pages_per_block": layout.packed_pages_per_block,
    }


def _memory(memory: str | None, device: Device, weights_bytes: int) -> dict[str, Any]:
    if memory is not None:
        return {"memory_bytes": _size(memory, "--memory"), "memory_from": "--memory"}
    try:
        free_bytes = free_gpu_bytes() if device == "cuda" else free_host_bytes()
    except OSError as error:
        raise typer.BadParameter(f"is needed here: {error}", param_hint="--memory") from None
    left_bytes = max(0, free_bytes - weights_bytes)
    return {"memory_bytes": left_bytes * 4 // 5, "memory_from": "80% of what the weights leave"}


def _size(text: str, option: str) -> int:
    from memd.units import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
