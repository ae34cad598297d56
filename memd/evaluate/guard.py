"""How much a model's keys and values lose when they are packed, measured when it is loaded.

A format that suits most models ruins some: those with a few key channels that are far larger than
the rest. Told before the first request rather than by its text.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from memd_kernels import pack_pages
from memd_kernels.formats import FormatName, PackedFormat, PackedPages, view_packed
from torch import Tensor

from memd.evaluate.policy import KVPolicy
from memd.evaluate.sequence import PagedSequence
from memd.models.config import ModelConfig
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout

MEASURED_TOKENS = 256
# Of a layer and head. Normally distributed numbers lose 0.8 % in int8, 12 % in int4, 3 % in fp8.
MOST_ERROR: dict[FormatName, float] = {"int8": 0.02, "int4": 0.2, "fp8": 0.05}
MOST_SPREAD = 10.0  # largest in SmolLM2, which int4 suits: 8


@dataclass(frozen=True)
class HeadLoss:
    """What one layer and KV head loses.

    Args:
        layer, head: Which, from 0.
        keys, values: Relative error, mean over pages; see `memd_kernels.pack_pages`.
        channel: The key channel that varies most within pages.
        spread: Its standard deviation over that of the median channel.
    """

    layer: int
    head: int
    keys: float
    values: float
    channel: int
    spread: float


@dataclass(frozen=True)
class Verdict:
    """Whether a model's pages may be packed.

    Args:
        format: In which format.
        worst_error: The largest of a layer and head.
        refusal: Why not; None: they may.
        warnings: What may cost quality.
    """

    format: FormatName
    worst_error: float
    refusal: str | None = None
    warnings: list[str] = field(default_factory=list)


def check_packing(
    forward: Callable[[ForwardBatch, Tensor, PackedPages | None], Tensor],
    config: ModelConfig,
    packed_format: PackedFormat,
    dtype: torch.dtype,
    device: torch.device,
    layout: KVLayout | None = None,
) -> Verdict:
    """Measure a model and judge; see `measure_losses` and `judge`."""
    losses = measure_losses(forward, config, packed_format, dtype, device, layout)
    return judge(packed_format.name, losses)


def measure_losses(
    forward: Callable[[ForwardBatch, Tensor, PackedPages | None], Tensor],
    config: ModelConfig,
    packed_format: PackedFormat,
    dtype: torch.dtype,
    device: torch.device,
    layout: KVLayout | None = None,
) -> list[HeadLoss]:
    """Compute some tokens, pack their pages, and see what is lost.

    The tokens are the same for every model and drawn as often as words are: most models number
    them by how common they are. The first page is left out: it holds the token that all others
    attend to, which is like no other, and stays full unless `full_precision_tokens` is 0.

    Args:
        forward: See `memd.models.decoder.Decoder.forward`.
        config: The model's.
        packed_format: Of the pages.
        dtype: Of the model.
        device: Where it is.
        layout: Of the pool that the model will serve from: then no kernel is compiled for this
            alone. None: all pages lie in one block.

    Returns:
        One entry for each layer and head; none where the longest context has no second page.
    """
    pages = max(2, MEASURED_TOKENS // packed_format.page_tokens)
    num_tokens = min(pages * packed_format.page_tokens, config.max_position)
    page_tokens = packed_format.page_tokens
    full, packed_each = (
        (None, None) if layout is None else (layout.pages_per_block, layout.packed_pages_per_block)
    )
    sequence = PagedSequence(config, KVPolicy(), page_tokens, num_tokens, dtype, device, full)
    packed = _packed_pages(config, packed_format, pages, packed_each, device)
    chance = random.Random(0)
    ids = [int(config.vocab_size ** chance.random()) - 1 for _ in range(num_tokens)]
    with torch.inference_mode():
        batch = sequence.chunk(torch.tensor(ids, device=device), 0)
        forward(replace(batch, logits_rows=batch.positions[-1:]), sequence.kv, packed)
        # Without the first page, and one that is not filled.
        kept = range(1, num_tokens // packed_format.page_tokens)
        if not kept:
            return []
        sources = torch.tensor(list(kept), dtype=torch.int32, device=device)
        errors = pack_pages(sequence.kv, packed, sources, sources - kept.start).mean(0)
        deviation = _deviation(sequence.kv.flatten(0, 1)[kept.start : kept.stop, :, 0].float())
    largest, channel = deviation.max(-1)
    spread = largest / deviation.median(-1).values
    return [
        HeadLoss(
            layer=layer,
            head=head,
            keys=float(errors[layer, head, 0]),
            values=float(errors[layer, head, 1]),
            channel=int(channel[layer, head]),
            spread=float(spread[layer, head]),
        )
        for layer in range(config.num_layers)
        for head in range(config.num_kv_heads)
    ]


def judge(name: FormatName, losses: Sequence[HeadLoss]) -> Verdict:
    """Refuse what loses more than `MOST_ERROR`; warn of outlier key channels for `int4`.

    A key's channels have scales of their own, so that a large one does not spoil the others. But
    its own steps are as large as it is; with 16 of them they show in every score it takes part in.
    """
    if not losses:
        return Verdict(name, 0.0)
    worst = max(losses, key=lambda loss: max(loss.keys, loss.values))
    error, limit = max(worst.keys, worst.values), MOST_ERROR[name]
    refusal = None
    if error > limit:
        part = "keys" if worst.keys == error else "values"
        refusal = (
            f"packed in {name}, {part} of layer {worst.layer}, KV head {worst.head} are "
            f"{error:.1%} off, more than {limit:.0%}"
        )
    return Verdict(name, error, refusal, _outliers(losses) if name == "int4" else [])


def _outliers(losses: Sequence[HeadLoss]) -> list[str]:
    found = [loss for loss in losses if loss.spread > MOST_SPREAD]
    if not found:
        return []
    worst = max(found, key=lambda loss: loss.spread)
    return [
        f"{len(found)} of {len(losses)} KV heads have key channels that vary more than "
        f"{MOST_SPREAD:.0f} times as much as the median channel, which int4 may not suit; most of "
        f"all channel {worst.channel} of layer {worst.layer}, head {worst.head}: "
        f"{worst.spread:.0f} times"
    ]


def _packed_pages(
    config: ModelConfig,
    packed_format: PackedFormat,
    num_pages: int,
    per_block: int | None,
    device: torch.device,
) -> PackedPages:
    """Room for packed pages."""
    per_block = per_block or num_pages
    sizes = config.num_layers, config.num_kv_heads
    block_bytes = per_block * packed_format.page_bytes(*sizes)
    memory_bytes = -(-num_pages // per_block) * block_bytes
    memory = torch.zeros(memory_bytes, dtype=torch.uint8, device=device)
    return view_packed(memory, packed_format, block_bytes, *sizes)


def _deviation(keys: Tensor) -> Tensor:
    """Standard deviation of each channel within pages.

    Shapes:
        keys: [pages, num_layers, num_kv_heads, page_tokens, head_dim].

    Returns:
        [num_layers, num_kv_heads, head_dim].
    """
    return keys.var(3, correction=0).mean(0).sqrt()
