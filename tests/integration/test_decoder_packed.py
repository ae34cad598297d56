"""A decoder with sinks behind a window, over packed pages: how it is computed changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from memd.evaluate.policy import KVFormat, KVPolicy
from memd.evaluate.sequence import PagedSequence
from memd.models.checkpoint import load_tensors
from memd.models.decoder import Decoder
from memd.models.hub import read_config, resolve
from memd.models.spans import narrowed

PAGE_TOKENS, NUM_TOKENS = 16, 200
IDS = torch.tensor([(7 * index * index + 3 * index) % 256 for index in range(NUM_TOKENS)])
CPU = torch.device("cpu")


def logits(
    directory: Path, kv: KVFormat, sinks: int, chunk: int, decoding: bool = False
) -> torch.Tensor:
    """Of all positions, in a window of 90 tokens; pages are packed from the first token on."""
    files = resolve(str(directory))
    config = narrowed(read_config(files), 90, sinks)
    decoder = Decoder(config, load_tensors(files, config, torch.float32, CPU), CPU)
    policy = KVPolicy(kv, full_precision_tokens=0, recent_tokens=32)
    sequence = PagedSequence(config, policy, PAGE_TOKENS, NUM_TOKENS, torch.float32, CPU)
    found = []
    with torch.inference_mode():
        for start in range(0, NUM_TOKENS, chunk):
            batch = sequence.chunk(IDS[start : start + chunk], start)
            if decoding:
                batch = replace(batch, num_decodes=1, query_starts=batch.query_starts[:1])
            found.append(decoder.forward(batch, sequence.kv, sequence.packed))
    return torch.cat(found)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_sinks_in_packed_pages_decode_as_they_prefill(tmp_path: Path, kv: KVFormat) -> None:
    directory = tiny.write_model(tmp_path / "tiny", 2, max_position=1000)
    expected = logits(directory, kv, 20, 64)
    difference = (logits(directory, kv, 20, 1, decoding=True) - expected).abs().max()
    assert difference < 1e-3
    # Packing shows, and so do sinks, or this would prove nothing.
    for other in (logits(directory, "full", 20, 64), logits(directory, kv, 0, 64)):
        assert (other - expected).abs().max() > 3 * difference
