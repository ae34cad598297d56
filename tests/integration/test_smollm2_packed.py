"""Packed pages of the demo model, on a short text; the long one is benchmarks/compression.py."""

import demo
import pytest
import torch
from memd_kernels.formats import PackedFormat

from memd.evaluate.compare import compare
from memd.evaluate.guard import check_packing
from memd.evaluate.policy import KVPolicy
from memd.models.checkpoint import load_tensors
from memd.models.decoder import Decoder
from memd.models.hub import read_config
from memd.models.tokenizer import load_tokenizer

pytestmark = [demo.needs_demo_model, pytest.mark.slow]

NUM_TOKENS = 320
PAGE_TOKENS = 64


def test_packing_the_demo_model_costs_little() -> None:
    device, config = torch.device("cpu"), read_config(demo.files())
    tokenizer = load_tokenizer(demo.files(), config)
    assert tokenizer is not None
    ids = tokenizer.encode(demo.long_text())[:NUM_TOKENS]
    decoder = Decoder(config, load_tensors(demo.files(), config, torch.float32, device), device)
    policies = [KVPolicy("int8", 64, 64), KVPolicy("int4", 64, 64)]
    full, int8, int4 = compare(decoder, config, ids, policies, PAGE_TOKENS, torch.float32, device)
    assert int8.perplexity == pytest.approx(full.perplexity, rel=0.003)
    assert int4.perplexity == pytest.approx(full.perplexity, rel=0.015)
    assert 0 < int8.divergence < int4.divergence / 10
    assert int8.agreed >= 0.98 * full.predicted
    for name in ("int8", "int4"):
        packed = PackedFormat(name, PAGE_TOKENS, config.head_dim)
        verdict = check_packing(decoder.forward, config, packed, torch.float32, device)
        assert (verdict.refusal, verdict.warnings) == (None, [])
