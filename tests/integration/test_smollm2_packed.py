"""Packed pages of the demo model, on a short text; the long one is benchmarks/compression.py."""

from collections.abc import Callable

import demo
import pytest
import torch
from memd_kernels.formats import PACKED_PAGE, FormatName, PackedFormat, PackedPages
from torch import Tensor

from memd.evaluate.compare import Quality, compare
from memd.evaluate.guard import check_packing
from memd.evaluate.policy import KVPolicy
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder, ForwardBatch
from memd.models.hub import read_config
from memd.models.tokenizer import load_tokenizer

pytestmark = [demo.needs_demo_model, pytest.mark.slow]

NUM_TOKENS = 192
PAGE_TOKENS = 32  # half of what the last 64 tokens see of the text is packed
FORMATS: tuple[FormatName, ...] = ("int8", "int4")
DEVICE = torch.device("cpu")


def remembering(
    forward: Callable[..., Tensor],
) -> Callable[[ForwardBatch, Tensor, PackedPages | None], Tensor]:
    """A decoder's forward pass that computes nothing twice as long as all pages are full."""
    known: dict[object, tuple[Tensor, Tensor]] = {}

    def call(batch: ForwardBatch, kv: Tensor, packed: PackedPages | None = None) -> Tensor:
        if (batch.page_table >= PACKED_PAGE).any():
            return forward(batch, kv, packed)
        used = -(-int(batch.kv_lens[0]) // kv.shape[5])
        pages = batch.page_table[0, :used].long()
        wanted = None if batch.logits_rows is None else tuple(batch.logits_rows.tolist())
        key = kv.shape[5], tuple(batch.token_ids.tolist()), tuple(batch.positions.tolist()), wanted
        if key not in known:
            logits = forward(batch, kv, packed)
            known[key] = logits, kv[0, pages]
        logits, after = known[key]
        kv[0, pages] = after
        return logits

    return call


@pytest.fixture(scope="module")
def model() -> tuple[Decoder, ModelConfig]:
    config = read_config(demo.files())
    decoder = Decoder(config, load_tensors(demo.files(), config, torch.float32, DEVICE), DEVICE)
    decoder.forward = remembering(decoder.forward)  # type: ignore[method-assign, assignment]
    return decoder, config


@pytest.fixture(scope="module")
def qualities(model: tuple[Decoder, ModelConfig]) -> list[Quality]:
    """Of full pages, and of each format."""
    decoder, config = model
    tokenizer = load_tokenizer(demo.files(), config)
    assert tokenizer is not None
    ids = tokenizer.encode(demo.long_text())[:NUM_TOKENS]
    policies = [KVPolicy(name, PAGE_TOKENS, PAGE_TOKENS) for name in FORMATS]
    return compare(decoder, config, ids, policies, PAGE_TOKENS, torch.float32, DEVICE)


def test_packing_the_demo_model_costs_little(qualities: list[Quality]) -> None:
    full, int8, int4 = qualities
    assert int8.perplexity == pytest.approx(full.perplexity, rel=0.003)
    assert int4.perplexity == pytest.approx(full.perplexity, rel=0.015)
    assert 0 < int8.divergence < int4.divergence / 10
    assert int8.agreed >= 0.98 * full.predicted


@pytest.mark.parametrize("name", FORMATS)
def test_the_demo_model_is_not_refused(
    model: tuple[Decoder, ModelConfig], name: FormatName
) -> None:
    decoder, config = model
    packed = PackedFormat(name, 64, config.head_dim)
    verdict = check_packing(decoder.forward, config, packed, torch.float32, DEVICE)
    assert (verdict.refusal, verdict.warnings) == (None, [])
    assert verdict.worst_error > 0
