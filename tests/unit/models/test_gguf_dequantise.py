"""Decoding with torch gives what the gguf package gives, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from memd.models import gguf_dequantise
from memd.models.gguf_dequantise import can_dequantise, dequantise

KINDS = [kind for kind in GGMLQuantizationType if can_dequantise(kind)]


def random_bytes(kind: GGMLQuantizationType, num_blocks: int) -> np.ndarray:
    """Any bytes are a tensor; scales of every size and sign occur, NaN and infinity too."""
    type_size = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(kind).integers(0, 256, (num_blocks, type_size), dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_package(
    kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_dequantise, "_PART_VALUES", 7 * 256)  # parts, the last one odd
    data = random_bytes(kind, 173)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data, kind).ravel()
    got = dequantise(torch.from_numpy(data).flatten(), kind, torch.float32).numpy()
    np.testing.assert_array_equal(got, want)
    finite = np.isfinite(want)
    assert finite.mean() > 0.5
    np.testing.assert_array_equal(got[finite].view(np.uint32), want[finite].view(np.uint32))


def test_every_common_encoding_is_decoded_here() -> None:
    names = {kind.name for kind in KINDS}
    common = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K"
    assert names == set(common.split())


def test_rounding_to_the_weights_dtype_happens_once() -> None:
    data = random_bytes(GGMLQuantizationType.Q4_K, 40)
    data[:, 1::2] &= 0x3F  # scales without NaN and infinity
    flat = torch.from_numpy(data).flatten()
    exact = dequantise(flat, GGMLQuantizationType.Q4_K, torch.float32)
    rounded = dequantise(flat, GGMLQuantizationType.Q4_K, torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16())
