"""Weights on a CUDA device are those of the file, decoded as on the CPU."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from memd.models.gguf_dequantise import can_dequantise, dequantise
from memd.models.upload import Uploader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda", 0)
MIB = 2**20


def test_tensors_of_every_size_arrive() -> None:
    """Smaller than a reader's part, odd, and so many that each buffer is used again."""
    sizes = [1, 7, 4 * MIB, 32 * MIB - 1, 33 * MIB + 5, 150 * MIB]
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    shaped = torch.randn(300, 20, dtype=torch.bfloat16)
    with Uploader(DEVICE) as uploader:
        uploaded = [uploader.upload(tensor) for tensor in tensors]
        matrix = uploader.upload(shaped)
    for got, want in zip(uploaded, tensors, strict=True):
        assert got.device == DEVICE
        assert torch.equal(got.cpu(), want)
    assert torch.equal(matrix.cpu(), shaped)


@pytest.mark.parametrize(
    "kind", list(filter(can_dequantise, GGMLQuantizationType)), ids=lambda kind: kind.name
)
def test_blocks_are_decoded_as_on_the_cpu(kind: GGMLQuantizationType) -> None:
    type_size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(kind).integers(0, 256, 500 * type_size, dtype=np.uint8)
    with Uploader(DEVICE) as uploader:
        got = dequantise(uploader.upload_bytes(data), kind, torch.float32).cpu()
    want = dequantise(torch.from_numpy(data), kind, torch.float32)
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    assert same.all()


def test_decoding_takes_little_memory_beside_the_result() -> None:
    kind = GGMLQuantizationType.Q4_K
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    num_values = 2**28
    data = torch.zeros(num_values // block_size * type_size, dtype=torch.uint8, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = dequantise(data, kind, torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before < values.nbytes + 400 * MIB
