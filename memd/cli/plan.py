"""`memd plan`: what fits into how much memory, before anything is loaded."""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memd.automatic import ELEMENT_BYTES, PAGE_TOKENS, Device, dtype_for
from memd.cli.common import Format, FormatOption, emit, print_fields
from memd.machine import free_gpu_bytes, free_host_bytes, has_nvidia_driver

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
    layout = plan_layout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        element_bytes=ELEMENT_BYTES[chosen],
        page_tokens=page_tokens or PAGE_TOKENS[device],
        granule_bytes=GRANULE_BYTES[device],
        target_block_bytes=_size(block_size, "--block-size"),
    )
    facts = {
        "model": model,
        "device": device,
        "dtype": chosen,
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
        Capacity in blocks, pages and tokens, the longest context that model and pool allow, what
        bounds a sequence (None: nothing), the pages that one of `context_tokens` holds at most, and
        how many of them are held at once.
    """
    layout = bounds.layout
    pages = pool_bytes // layout.block_bytes * layout.pages_per_block
    pages = pages or min(pool_bytes // layout.page_bytes, layout.pages_per_block)
    counted = context_tokens or min(4096, max_position)
    # Behind a window only distances within it count, not how long the text is.
    endless = bounds.window is not None and bounds.window + bounds.sinks <= max_position
    peak_pages, whole = bounds.peak_pages(counted), bounds.peak_pages(max_position) <= pages
    return {
        "pool_blocks": -(-pages // layout.pages_per_block),
        "pool_pages": pages,
        "pool_tokens": pages * layout.page_tokens,
        "model_context_tokens": max_position,
        "longest_context_tokens": (
            max_position if whole else min(max_position, pages * layout.page_tokens)
        ),
        "window_tokens": bounds.window,
        "budget_tokens": None if bounds.budget is None else bounds.budget.tokens,
        "context_tokens": counted,
        "pages_of_context": peak_pages,
        "sequences_of_context": (pages // peak_pages if counted <= max_position or endless else 0),
    }


def _bounds(
    layout: "KVLayout", config: "ModelConfig", window: int | None, sinks: int, budget: int | None
) -> "SequenceBounds":
    """What bounds a sequence, as an engine with these settings would have it."""
    from memd.models.spans import narrowed, widest
    from memd.pool.bounds import SequenceBounds
    from memd.pool.budget import Budget

    if budget is None:
        return SequenceBounds(layout, *widest(narrowed(config, window, sinks)))
    if window is not None or any(config.windows):
        owner = "--window" if window is not None else "a window of the model's own"
        raise typer.BadParameter(f"not together with {owner}", param_hint="--budget")
    pages, sink_pages = budget // layout.page_tokens, layout.pages_for(sinks)
    try:
        bound = Budget(pages, sink_pages, "recency", layout.page_tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from None
    return SequenceBounds(layout, None, sinks, bound)


def disk_fit(layout: "KVLayout", limit_bytes: int) -> dict[str, Any]:
    """What a disk tier of `limit_bytes` holds, in pages and tokens."""
    from memd.pool.disk_index import DiskIndex
    from memd.tiers.page_files import file_bytes

    size = file_bytes(layout.page_tokens, layout.page_bytes)
    pages = DiskIndex(size, limit_bytes).capacity_pages
    return {
        "disk_bytes": limit_bytes,
        "disk_pages": pages,
        "disk_tokens": pages * layout.page_tokens,
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
        "block_waste_bytes": layout.waste_bytes,
        "block_waste_share": layout.waste_bytes / layout.block_bytes,
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
