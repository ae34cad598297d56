"""What `memd eval` reports: loads a model, measures policies on a text, adds their memory."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from memd_kernels.formats import PackedFormat

from memd.automatic import PAGE_TOKENS
from memd.config import Settings
from memd.engine.device import (
    choose_device,
    choose_driver,
    choose_dtype,
    cpu_threads,
    load_launch_table,
)
from memd.errors import ModelError, RequestError
from memd.evaluate.accounting import Footprint, footprint
from memd.evaluate.compare import Quality, compare
from memd.evaluate.policy import KVFormat, KVPolicy
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.hub import ModelFiles, read_config, resolve
from memd.models.tokenizer import load_tokenizer
from memd.pool.layout import KVLayout, plan_layout

DEFAULT_TOKENS = 4096


def evaluate(
    settings: Settings,
    text: Path,
    num_tokens: int | None,
    policies: Sequence[KVPolicy],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Compare policies with full KV on the beginning of a text, as one sequence.

    Args:
        settings: Model, dtype, page size and device are taken from them.
        text: A file in UTF-8.
        num_tokens: How many of its tokens, from 2 to the model's longest context; None:
            `DEFAULT_TOKENS`, or what model and text have if that is less.
        policies: What is compared.
        progress: Tokens done, and in all.

    Returns:
        Plain data: facts of the run, `full` with the figures of full KV, and a row for each policy.
        `rise` is perplexity over that with full KV, less 1; `ratio` is bytes with full KV over
        bytes; `bfloat16_ratio` the same where full pages have two bytes an element.

    Raises:
        RequestError: the text or a number does not fit; `param` tells which.
        ModelError: the model cannot be found, read or served, or has no tokenizer.
        SettingsError: the settings ask for a device that is not there.
    """
    device = choose_device(settings)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(settings))
    load_launch_table(device)
    files = resolve(settings.model.path)
    config = read_config(files)
    token_ids = read_tokens(files, config, text, num_tokens)
    dtype = choose_dtype(settings, config, device)
    wished = settings.memory.page_tokens
    page_tokens = PAGE_TOKENS[device.type] if wished == "auto" else wished
    decoder = Decoder(config, load_tensors(files, config, dtype, device), device)
    full, *found = compare(
        decoder,
        config,
        token_ids,
        policies,
        page_tokens,
        dtype,
        device,
        lambda done: progress(done, len(token_ids)),
    )
    layouts = _Layouts(settings, config, page_tokens, device)
    memory = layouts.footprint(KVPolicy(), dtype, len(token_ids))
    return {
        "model": files.name,
        "text": str(text),
        "tokens": len(token_ids),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "page_tokens": page_tokens,
        "full": {"perplexity": _finite(full.perplexity), "kv_bytes": memory.kv_bytes},
        "rows": [
            _row(policy, quality, full, layouts, dtype, len(token_ids))
            for policy, quality in zip(policies, found, strict=True)
        ],
    }


def read_tokens(
    files: ModelFiles, config: ModelConfig, text: Path, num_tokens: int | None
) -> list[int]:
    """The first tokens of a text.

    Raises:
        RequestError: see `evaluate`.
        ModelError: the model has no tokenizer.
    """
    if num_tokens is not None and not 2 <= num_tokens <= config.max_position:
        raise RequestError(
            f"{num_tokens} is not from 2 to {config.max_position}, the model's longest context",
            "tokens",
        )
    tokenizer = load_tokenizer(files, config)
    if tokenizer is None:
        raise ModelError(f"{files.name} has no tokenizer, which a text needs")
    try:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{text} cannot be read as UTF-8: {error}", "text") from None
    wanted = num_tokens or min(max(2, len(ids)), DEFAULT_TOKENS, config.max_position)
    if len(ids) < wanted:
        raise RequestError(f"{text} has {len(ids)} tokens, {wanted} are needed", "text")
    return ids[:wanted]


class _Layouts:
    """The layout of a model's KV, by dtype and packed format."""

    def __init__(
        self, settings: Settings, config: ModelConfig, page_tokens: int, device: torch.device
    ) -> None:
        self._config = config
        self._page_tokens = page_tokens
        self._block_bytes = settings.memory.block_size
        self._granule_bytes = choose_driver(device).granule_bytes

    def footprint(self, policy: KVPolicy, dtype: torch.dtype, num_tokens: int) -> Footprint:
        """Memory of a sequence under a policy, where full pages are of a dtype."""
        return footprint(self._layout(policy.kv, dtype), policy, num_tokens)

    def _layout(self, kv: KVFormat, dtype: torch.dtype) -> KVLayout:
        config = self._config
        packed_page_bytes = None
        if kv != "full":
            packed = PackedFormat(kv, self._page_tokens, config.head_dim)
            packed_page_bytes = packed.page_bytes(config.num_layers, config.num_kv_heads)
        return plan_layout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            element_bytes=dtype.itemsize,
            page_tokens=self._page_tokens,
            granule_bytes=self._granule_bytes,
            target_block_bytes=self._block_bytes,
            packed_page_bytes=packed_page_bytes,
        )


def _row(
    policy: KVPolicy,
    quality: Quality,
    full: Quality,
    layouts: _Layouts,
    dtype: torch.dtype,
    num_tokens: int,
) -> dict[str, Any]:
    memory = layouts.footprint(policy, dtype, num_tokens)
    ratios = [
        layouts.footprint(KVPolicy(), each, num_tokens).kv_bytes
        / layouts.footprint(policy, each, num_tokens).kv_bytes
        for each in (dtype, torch.bfloat16)
    ]
    errors = quality.packing_errors
    return {
        "kv": policy.kv,
        "window": policy.window,
        "full_precision_tokens": policy.full_precision_tokens,
        "recent_tokens": policy.recent_tokens,
        "perplexity": _finite(quality.perplexity),
        "rise": _finite(quality.perplexity / full.perplexity - 1),
        "agreement": quality.agreed / quality.predicted,
        "divergence": _finite(quality.divergence / quality.predicted),
        "packing_error": sum(errors) / len(errors) if errors else None,
        "worst_packing_error": max(errors, default=None),
        "full_pages": memory.full_pages,
        "packed_pages": memory.packed_pages,
        "kv_bytes": memory.kv_bytes,
        "ratio": ratios[0],
        "bfloat16_ratio": ratios[1],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
