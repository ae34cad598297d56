"""Pages copied between two memories: every byte of every page, and no other."""

import pytest
import torch
from memd_kernels.reference.host_pages import copy_host_pages as reference
from memd_kernels.triton.host_pages import copy_host_pages
from torch import Tensor


def memories(num_pages: int, page_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random source, and a target of 255, each with 48 bytes too many at its end."""
    size = num_pages * page_bytes + 48
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    target = torch.full_like(source, 255)
    if device.type == "cuda":
        return source.pin_memory(), target.to(device)
    return source, target


@pytest.mark.parametrize("page_bytes", [16, 4096, 16 * 1024, 16 * 1024 + 48, 40 * 1024])
@pytest.mark.parametrize("num_pages", [1, 19])
def test_pages_land_where_they_should(
    page_bytes: int, num_pages: int, device: torch.device
) -> None:
    host, pool = memories(num_pages, page_bytes, device)
    slots = torch.randperm(num_pages).to(device) * page_bytes + 32
    pages = torch.randperm(num_pages).to(device) * page_bytes + 16
    want = pool.cpu()
    reference(host, want, slots.cpu(), pages.cpu(), page_bytes)
    copy_host_pages(host, pool, slots, pages, page_bytes)
    assert torch.equal(pool.cpu(), want)
    back = torch.full_like(host, 255)
    if device.type == "cuda":
        back = back.pin_memory()
    want = back.clone()
    reference(pool.cpu(), want, pages.cpu(), slots.cpu(), page_bytes)
    copy_host_pages(pool, back, pages, slots, page_bytes)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back, want)


def test_nothing_to_copy(device: torch.device) -> None:
    host, pool = memories(1, 64, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    copy_host_pages(host, pool, none, none, 64)
    assert (pool == 255).all()


@pytest.mark.parametrize("copy", [copy_host_pages, reference])
def test_what_cannot_be_copied_is_refused(copy: object, device: torch.device) -> None:
    assert callable(copy)
    host, pool = memories(2, 64, device)
    starts = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="page_bytes is 24"):
        copy(host, pool, starts, starts, 24)
    with pytest.raises(ValueError, match=r"offsets have shapes \(2,\) and \(1,\)"):
        copy(host, pool, starts, starts[:1], 64)
    with pytest.raises(ValueError, match="in bytes"):
        copy(host[::2], pool, starts, starts, 64)
    assert (pool == 255).all()
