"""Puts packed pages together: their format, and whether it suits the model. Part of the engine's
composition root.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from memd_kernels.formats import PackedFormat, PackedPages, view_packed
from torch import Tensor

from memd.automatic import page_tokens_for
from memd.config import Settings
from memd.config_kv import KvSettings
from memd.engine.device import fp8_missing
from memd.engine.packing import Packing
from memd.engine.packing_errors import PackingErrors
from memd.engine.scheduler import Scheduler
from memd.errors import SettingsError
from memd.evaluate.guard import check_packing
from memd.models.config import ModelConfig
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout
from memd.pool.packing import PackingSchedule
from memd.pool.pool import Pool
from memd.types import PageId

logger = logging.getLogger(__name__)

INSTEAD = {"int4": "int8, which loses less, or full", "int8": "full", "fp8": "int8 or full"}


def choose_format(
    settings: Settings, model: ModelConfig, device: torch.device
) -> PackedFormat | None:
    """The format of packed pages that the settings ask for; None: there are none.

    Raises:
        SettingsError: the device or the model cannot have it.
    """
    form, page_tokens = settings.kv.format, settings.memory.page_tokens
    if form == "full":
        return None
    missing = fp8_missing(device) if form == "fp8" else None
    if missing is not None:
        raise SettingsError({"kv.format": f"is fp8: {missing}; set int8, int4 or full"})
    if page_tokens == "auto":
        page_tokens = page_tokens_for(device.type, packed=True)
    try:
        return PackedFormat(form, page_tokens, model.head_dim)
    except ValueError as error:
        raise SettingsError({"kv.format": f"is {form}: {error}; full suits every model"}) from None


def packing_schedule(kv: KvSettings, form: PackedFormat | None) -> PackingSchedule | None:
    """Which pages are packed when; None: none are."""
    if form is None:
        return None
    return PackingSchedule(form.page_tokens, kv.full_precision_tokens, kv.recent_tokens)


def build_packing(
    forward: Callable[[ForwardBatch, Tensor, PackedPages | None], Tensor],
    model: ModelConfig,
    form: PackedFormat | None,
    dtype: torch.dtype,
    device: torch.device,
    pool: Pool,
    scheduler: Scheduler,
    errors: PackingErrors,
) -> Packing | None:
    """Measure what packing costs this model; None: there is no format.

    Args:
        pool: Its schedule is set.

    Raises:
        SettingsError: it loses more than the format may.
    """
    if form is None or pool.packing is None:
        return None
    verdict = check_packing(forward, model, form, dtype, device, pool.layout)
    if verdict.refusal is not None:
        raise SettingsError(
            {"kv.format": f"is {form.name}: {verdict.refusal}; set {INSTEAD[form.name]}"}
        )
    for warning in verdict.warnings:
        logger.warning("kv.format is %s: %s", form.name, warning)
    return Packing(pool, scheduler, errors, verdict)


def packed_view(arena: Tensor, form: PackedFormat | None, layout: KVLayout) -> PackedPages | None:
    """The packed pages of an arena; None: there are none."""
    if form is None:
        return None
    return view_packed(arena, form, layout.block_bytes, layout.num_layers, layout.num_kv_heads)


def table_entries(pool: Pool) -> Callable[[Sequence[PageId]], list[int]] | None:
    """What page tables hold for pages; None: their ids, as all are full."""
    layout, is_packed = pool.layout, pool.blocks.is_packed
    if layout.packed_page_bytes is None:
        return None
    return lambda pages: [layout.table_entry(page, is_packed(page)) for page in pages]


def kv_namespace(kv: KvSettings) -> str:
    """What else sequences must have in common to share pages; empty: nothing, pages are full."""
    if kv.format == "full":
        return ""
    return f"/{kv.format}-{kv.full_precision_tokens}-{kv.recent_tokens}"
