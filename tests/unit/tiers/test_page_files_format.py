"""What the bytes of page files say: whoever changes that gives them another `VERSION`."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from memd_kernels.formats import FORMAT_NAMES, FormatName, PackedFormat, view_packed
from memd_kernels.reference import unpack_pages

from memd.pool.files import PageFile
from memd.tiers.page_files import VERSION, PackedPage, PageFiles

PAGE_TOKENS, HEAD_DIM, LAYERS, HEADS = 64, 16, 2, 3
FULL_BYTES = LAYERS * 2 * HEADS * PAGE_TOKENS * HEAD_DIM * 4
LOST = "files of former versions are misread"
FILES = {
    "full": "558432921c1331fba0e5ad16adfdbdf2de1e089aa14b62b0a5edd5c4218e82e9",
    "int8-64": "6000ed17172206f8f8aa877cdda5cec1dd1c6ab8be9e2fd65393f7df9e237e8e",
}
NUMBERS: dict[FormatName, str] = {
    "int8": "6785e678c3c1017606a2815702aca914fdf45147373afda06a229e88f4e206e1",
    "int4": "293a3ce923b6ea975a460d0ef86a054ad5796e6809b939ef9998a9bc3a4895ba",
    "fp8": "57d84e43fe938e858dd21722257b10230acea822d3bc4a5a29a6c23233d1484f",
}


def page_of(size_bytes: int) -> torch.Tensor:
    """Bytes that are finite numbers, whatever they are read as."""
    return (torch.arange(size_bytes) * 7919 % 101 % 53).to(torch.uint8)


@pytest.mark.parametrize("name", FILES)
def test_files_of_this_version_are_these(tmp_path: Path, name: str) -> None:
    packed = name != "full"
    files = PageFiles(tmp_path, "model", PAGE_TOKENS, 900, PackedPage("int8-64", 500))
    file = PageFile(b"k" * 32, b"p" * 32, bytes(range(256)), packed)
    files.write(file, memoryview(page_of(500 if packed else 900).numpy()))
    written = files.path(file.key).read_bytes()
    assert (VERSION, sha256(written).hexdigest()) == (2, FILES[name]), LOST


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_packed_pages_of_this_version_are_these_numbers(name: FormatName) -> None:
    form = PackedFormat(name, PAGE_TOKENS, HEAD_DIM)
    size_bytes = form.page_bytes(LAYERS, HEADS)
    packed = view_packed(page_of(size_bytes), form, size_bytes, LAYERS, HEADS)
    kv = torch.zeros(1, 1, LAYERS, 2, HEADS, PAGE_TOKENS, HEAD_DIM)
    first = torch.zeros(1, dtype=torch.int32)
    unpack_pages(packed, kv, first, first)
    assert kv.isfinite().all()
    numbers = kv.half().numpy().tobytes()
    assert (VERSION, sha256(numbers).hexdigest()) == (2, NUMBERS[name]), LOST
