"""What `memd eval` reports: loads a model, measures policies on a text, adds their memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memd_kernels.formats import PackedFormat

from memd.automatic import page_tokens_for
from memd.config import Settings
from memd.engine.device import (
    choose_device,
    choose_driver,
    choose_dtype,
    fp8_missing,
    load_launch_table,
    use_threads,
)
from memd.errors import ModelError, OutOfDeviceMemory, RequestError
from memd.evaluate.accounting import Footprint, footprint
from memd.evaluate.compare import Quality, compare
from memd.evaluate.policy import KVPolicy
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.hub import ModelFiles, read_config, resolve
from memd.models.rope import stretched
from memd.models.tokenizer import load_tokenizer
from memd.pool.layout import plan_layout

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
        OutOfDeviceMemory: model and sequences do not fit.
    """
    subject = _find(settings, text, num_tokens, any(policy.kv != "full" for policy in policies))
    for policy in policies:
        subject.check(policy)
    full, *found = _measure(subject, policies, progress)
    return {
        "model": subject.files.name,
        "text": str(text),
        "tokens": len(subject.token_ids),
        "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "page_tokens": subject.page_tokens,
        "full": {
            "perplexity": _finite(full.perplexity),
            "kv_bytes": subject.footprint(KVPolicy()).kv_bytes,
        },
        "rows": [
            _row(subject, policy, quality, full)
            for policy, quality in zip(policies, found, strict=True)
        ],
    }


@dataclass(frozen=True)
class _Subject:
    """What is measured: a model, and the tokens it predicts."""

    files: ModelFiles
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    page_tokens: int
    block_bytes: int  # about
    token_ids: list[int]

    def check(self, policy: KVPolicy) -> None:
        """Raise RequestError where pages of the format, or so few of them, cannot be had."""
        kv = policy.kv
        if policy.bound(self.page_tokens) is not None and any(self.config.windows):
            raise RequestError("layers of this model have windows of their own", "budget")
        if kv == "full":
            return
        try:
            PackedFormat(kv, self.page_tokens, self.config.head_dim)
        except ValueError as error:
            raise RequestError(f"no pages can be packed in {kv}: {error}", "kv") from None
        missing = fp8_missing(self.device) if kv == "fp8" else None
        if missing is not None:
            raise RequestError(missing, "kv")

    def footprint(self, policy: KVPolicy, element_bytes: int | None = None) -> Footprint:
        """Memory under a policy; full pages have `element_bytes` an element, or as the dtype."""
        config, packed_page_bytes = self.config, None
        if policy.kv != "full":
            packed = PackedFormat(policy.kv, self.page_tokens, config.head_dim)
            packed_page_bytes = packed.page_bytes(config.num_layers, config.num_kv_heads)
        layout = plan_layout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            element_bytes=element_bytes or self.dtype.itemsize,
            page_tokens=self.page_tokens,
            granule_bytes=choose_driver(self.device).granule_bytes,
            target_block_bytes=self.block_bytes,
            packed_page_bytes=packed_page_bytes,
        )
        return footprint(layout, policy, len(self.token_ids))


def _find(settings: Settings, text: Path, num_tokens: int | None, packed: bool) -> _Subject:
    """All that is known before the weights are read."""
    device = choose_device(settings)
    files = resolve(settings.model.path)
    config = stretched(read_config(files), settings.model.max_len)
    wished = settings.memory.page_tokens
    use_threads(settings, device)
    load_launch_table(device)
    return _Subject(
        files=files,
        config=config,
        device=device,
        dtype=choose_dtype(settings, config, device),
        page_tokens=page_tokens_for(device.type, packed) if wished == "auto" else wished,
        block_bytes=settings.memory.block_size,
        token_ids=read_tokens(files, config, text, num_tokens),
    )


def _measure(
    subject: _Subject, policies: Sequence[KVPolicy], progress: Callable[[int, int], None]
) -> list[Quality]:
    files, config, device, dtype = subject.files, subject.config, subject.device, subject.dtype
    total = len(subject.token_ids)
    try:
        decoder = Decoder(config, load_tensors(files, config, dtype, device), device)
        return compare(
            decoder,
            config,
            subject.token_ids,
            policies,
            subject.page_tokens,
            dtype,
            device,
            lambda done: progress(done, total),
        )
    except torch.OutOfMemoryError:
        raise OutOfDeviceMemory(
            f"{device} has no room for the model and {len(policies) + 1} sequences of {total} "
            "tokens; name fewer formats or tokens"
        ) from None


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


def _row(subject: _Subject, policy: KVPolicy, quality: Quality, full: Quality) -> dict[str, Any]:
    memory = subject.footprint(policy)
    return {
        "kv": policy.kv,
        "window": policy.window,
        "sinks": policy.sinks,
        "budget": policy.budget,
        "drop": policy.drop if policy.budget is not None else None,
        "full_precision_tokens": policy.full_precision_tokens,
        "recent_tokens": policy.recent_tokens,
        "perplexity": _finite(quality.perplexity),
        "rise": _finite(quality.perplexity / full.perplexity - 1),
        "agreement": quality.agreed / quality.predicted,
        "divergence": _finite(quality.divergence / quality.predicted),
        **_packing_errors(quality),
        "full_pages": memory.full_pages,
        "packed_pages": memory.packed_pages,
        "kv_bytes": memory.kv_bytes,
        "ratio": subject.footprint(KVPolicy()).kv_bytes / memory.kv_bytes,
        "bfloat16_ratio": (
            subject.footprint(KVPolicy(), 2).kv_bytes / subject.footprint(policy, 2).kv_bytes
        ),
    }


def _packing_errors(quality: Quality) -> dict[str, float | None]:
    """Means over pages, layers and heads, and the largest; None where nothing was packed."""
    names = ("key_error", "value_error", "worst_error")
    if not quality.packing_errors:
        return dict.fromkeys(names)
    errors = torch.cat(list(quality.packing_errors))
    found = (*errors.mean((0, 1, 2)).tolist(), errors.max().item())
    return {name: _finite(value) for name, value in zip(names, found, strict=True)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
