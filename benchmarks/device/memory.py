"""Device memory, host copies and weights on a GPU: are they right, and how fast.

    PYTHONPATH=$PWD:$PWD/kernels python benchmarks/device/memory.py [--quick]

One line a case; ends within two minutes (`--quick`: 40 s), with status 1 if anything is wrong.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memd_kernels.triton import host_pages

from memd.arena.cuda import CudaDriver, supports_virtual_memory
from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.cuda import CudaHostCopier
from memd.types import PageId, SlotId, TransferId, TransferPath

KIB, MIB, GIB = 2**10, 2**20, 2**30
DEVICE = torch.device("cuda", 0)
failures: list[str] = []


def case(name: str, run: Callable[..., dict[str, Any]], *args: Any) -> None:
    """Run a case and print what it returns; `ok` False or an exception is a failure."""
    started_at = time.perf_counter()
    try:
        found = run(*args)
        torch.cuda.synchronize()
    except Exception as error:
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
    if not found.setdefault("ok", True):
        failures.append(name)
    facts = " ".join(f"{key}={value}" for key, value in found.items())
    print(f"{name:<34} {facts}  [{time.perf_counter() - started_at:.1f} s]", flush=True)


def used_bytes() -> int:
    """Memory in use on the device as others see it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception:
        free, total = torch.cuda.mem_get_info(DEVICE)
        return total - free


def median_us(times: list[float]) -> float:
    return round(statistics.median(times) * 1e6, 1)


def timed(times: list[float], call: Callable[..., object], *args: Any) -> None:
    started_at = time.perf_counter()
    call(*args)
    times.append(time.perf_counter() - started_at)


def arena_memory(num_blocks: int) -> dict[str, Any]:
    """Commit and decommit, seen from outside; beside work in flight, and with a graph alive."""
    driver, block = CudaDriver(DEVICE), 16 * MIB
    driver.reserve(64 * GIB)
    memory = driver.tensor()
    before = used_bytes()
    commits: list[float] = []
    for index in range(num_blocks):
        timed(commits, driver.commit, index * block, block)
    taken = used_bytes() - before
    words = memory.view(torch.int32)
    for index in range(num_blocks):
        words[index * block // 4 : (index + 1) * block // 4].fill_(index)
    table = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    found = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    torch.index_select(words, 0, table, out=found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.index_select(words, 0, table, out=found)
    beside: list[float] = []
    right = True
    for turn in range(20):
        chosen = [(turn * 7 + index) % (num_blocks - 8) for index in range(64)]
        table.copy_(torch.tensor(chosen) * (block // 4) + 5)
        torch.cuda._sleep(2_000_000)
        graph.replay()
        timed(beside, driver.commit, (num_blocks + turn) * block, block)
        right &= found.tolist() == chosen
    full = used_bytes()
    decommits: list[float] = []
    for index in reversed(range(num_blocks + 20)):
        timed(decommits, driver.decommit, index * block, block)
    given_back = full - used_bytes()
    driver.commit(0, block)
    words[: block // 4].fill_(77)
    table.zero_()
    graph.replay()
    right &= found.tolist() == [77] * 64
    driver.close()
    # The first granule has memory all the time.
    whole = taken >= num_blocks * block - 2 * MIB
    whole &= given_back >= (num_blocks + 20) * block - 2 * MIB
    return {
        "ok": right and whole,
        "commit_us": median_us(commits),
        "worst_us": round(max(commits) * 1e6),
        "beside_1ms_kernel_us": median_us(beside),
        "decommit_us": median_us(decommits),
        "taken_mib": taken // MIB,
        "of_mib": num_blocks * 16,
        "given_back_mib": given_back // MIB,
        "then_of_mib": (num_blocks + 20) * 16,
        "graph": right,
    }


class Stand:
    """A copier over plain device memory, with pages of one size."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        per_block = max(1, 16 * MIB // page_bytes)
        self.layout = KVLayout(1, 1, page_bytes // 64, 2, 16, per_block * page_bytes)
        self.memory = torch.empty(
            -(-num_pages // per_block) * self.layout.block_bytes, dtype=torch.uint8, device=DEVICE
        )
        self.copier = CudaHostCopier(host_pages.copy_host_pages)
        self.copier.open(self.memory, self.layout, num_pages)
        self.serial = 0

    def page(self, page: int) -> torch.Tensor:
        start = self.layout.page_offset_bytes(PageId(page))
        return self.memory[start : start + self.layout.page_bytes]

    def orders(self, path: TransferPath, pairs: list[tuple[int, int]]) -> list[Transfer]:
        self.serial += len(pairs)
        return [
            Transfer(TransferId(self.serial - index), path, PageId(page), SlotId(slot))
            for index, (page, slot) in enumerate(pairs)
        ]

    def wait(self, count: int) -> None:
        ended: list[tuple[TransferId, bool]] = []
        deadline = time.perf_counter() + 30
        while len(ended) < count:
            ended += self.copier.poll()
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{len(ended)} of {count} copies ended")
        if not all(succeeded for _, succeeded in ended):
            raise RuntimeError("copies failed")


def ordered_copies(page_bytes: int, num_pages: int, turns: int) -> dict[str, Any]:
    """Case C038: demoted at once after the step that writes, restored while another reads."""
    stand = Stand(page_bytes, 128)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(turns):
        count = num_pages if turn % 3 else 1  # the kernel's copies among the copy engine's
        pages = [(turn * 3 + index * 2) % 128 for index in range(count)]
        pairs = [(page, (page * 7 + turn) % 128) for page in pages]
        torch.cuda._sleep(500_000)
        for page in pages:
            stand.page(page).fill_((turn + page) % 250)
        stand.copier.start(stand.orders("d2h", pairs))
        stand.wait(count)
        for page in pages:
            stand.page(page).fill_(251)
        torch.cuda._sleep(500_000)
        read_before = [stand.page(page).clone() for page in pages]
        stand.copier.start(stand.orders("h2d", pairs))
        stand.wait(count)
        for page, content in zip(pages, read_before, strict=True):
            wrong += (content != 251).sum() + (stand.page(page) != (turn + page) % 250).sum()
    stand.copier.close()
    return {"ok": wrong.item() == 0, "turns": turns, "pages": num_pages, "wrong": wrong.item()}


def copy_rates(page_bytes: int, total_bytes: int, merged: bool) -> dict[str, Any]:
    """Both ways, one after another and together; host time is that of `start` alone."""
    num_pages = total_bytes // page_bytes
    stand = Stand(page_bytes, 2 * num_pages)
    stand.memory.random_(0, 255)
    before = stand.memory.clone()
    slots = list(range(num_pages)) if merged else torch.randperm(num_pages).tolist()
    first = list(zip(range(num_pages), slots, strict=True))
    second = [(page + num_pages, slot + num_pages) for page, slot in first]
    stand.copier.start(stand.orders("d2h", first + second))
    stand.wait(2 * num_pages)
    stand.memory.zero_()
    seconds: dict[str, list[float]] = {"d2h": [], "h2d": [], "both": []}
    host: list[float] = []
    for _ in range(3):
        for name, orders in (
            ("h2d", stand.orders("h2d", first + second)),
            ("d2h", stand.orders("d2h", first + second)),
            ("both", stand.orders("d2h", first) + stand.orders("h2d", second)),
        ):
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            timed(host, stand.copier.start, orders)
            stand.wait(2 * num_pages)
            seconds[name].append(time.perf_counter() - started_at)
    whole = 2 * num_pages * page_bytes  # the last block may have room for more pages
    right = torch.equal(stand.memory[:whole], before[:whole])
    stand.copier.close()
    rate = {
        name: round(2 * total_bytes / statistics.median(times) / 1e9, 1)
        for name, times in seconds.items()
    }
    host_us = round(statistics.median(host) / (2 * num_pages) * 1e6, 2)
    return {"ok": right, **{f"{name}_GBps": value for name, value in rate.items()}} | {
        "host_us_a_page": host_us
    }


def kernel_rates(page_bytes: int, programs: int) -> dict[str, Any]:
    """The kernel alone, on prepared tables, by events; with another number of programs."""
    total_bytes = 256 * MIB
    num_pages = total_bytes // page_bytes
    pool = torch.randint(0, 255, (total_bytes,), dtype=torch.uint8, device=DEVICE)
    host = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=True)
    pages, slots = (torch.randperm(num_pages, device=DEVICE) * page_bytes for _ in range(2))
    back = torch.zeros_like(pool)
    shipped = host_pages.NUM_PROGRAMS
    host_pages.NUM_PROGRAMS = programs
    rates: dict[str, float] = {}
    try:
        for name, arguments in (
            ("d2h", (pool, host, pages, slots)),
            ("h2d", (host, back, slots, pages)),
        ):
            times = []
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                host_pages.copy_host_pages(*arguments, page_bytes)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            rates[f"{name}_GBps"] = round(total_bytes / statistics.median(times) / 1e6, 1)
    finally:
        host_pages.NUM_PROGRAMS = shipped
    return {"ok": torch.equal(pool, back), **rates}


def pinning(total_bytes: int) -> dict[str, Any]:
    """How long pinning takes in the background, and what launches beside it feel."""
    stand = Stand(2 * MIB, total_bytes // (2 * MIB))
    x = torch.zeros(16, device=DEVICE)
    launches: list[float] = []
    started_at = time.perf_counter()
    last = total_bytes // (2 * MIB) - 1
    stand.copier.start(stand.orders("d2h", [(0, last)]))
    while not stand.copier.poll():
        timed(launches, x.add_, 1)
        if len(launches) % 100 == 0:
            torch.cuda.synchronize()
    seconds = time.perf_counter() - started_at
    stand.copier.close()
    return {
        "seconds_a_GiB": round(seconds / (total_bytes / GIB), 2),
        "launch_us": median_us(launches),
        "worst_launch_us": round(max(launches) * 1e6),
    }


def weights(total_bytes: int) -> dict[str, Any]:
    """A safetensors file to the device: our way, and the two ways of the library."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from memd.models.upload import Uploader

    shape = (8192, 4096)
    count = total_bytes // (2 * 8192 * 4096)
    tensors = {
        f"w{index}": torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        for index in range(count)
    } | {f"n{index}": torch.randn(4096, device=DEVICE, dtype=torch.bfloat16) for index in range(64)}
    found: dict[str, Any] = {}
    right = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)

        def ours() -> dict[str, torch.Tensor]:
            with safe_open(path, framework="pt") as file, Uploader(DEVICE) as uploader:
                return {name: uploader.upload(file.get_tensor(name)) for name in tensors}

        def pageable() -> dict[str, torch.Tensor]:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name).to(DEVICE) for name in tensors}

        def library() -> dict[str, torch.Tensor]:
            with safe_open(path, framework="pt", device=str(DEVICE)) as file:
                return {name: file.get_tensor(name) for name in tensors}

        for way in (ours, pageable, library, ours, pageable, library):
            started_at = time.perf_counter()
            got = way()
            torch.cuda.synchronize()
            rate = total_bytes / (time.perf_counter() - started_at) / 1e9
            found[f"{way.__name__}_GBps"] = round(rate, 1)  # the second time counts
            right &= all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
            del got
    return {"ok": right, **found}


def gguf_values() -> dict[str, Any]:
    """Decoded on the device as on the CPU, bit for bit; and how fast."""
    try:
        import gguf
    except ImportError:
        return {"skipped": "no package gguf"}
    from memd.models.gguf_dequantise import can_dequantise, dequantise

    differing: list[str] = []
    rates: dict[str, float] = {}
    for kind in filter(can_dequantise, gguf.GGMLQuantizationType):
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        data = torch.randint(0, 256, (4096 * type_size,), dtype=torch.uint8)
        want = dequantise(data, kind, torch.float32)
        got = dequantise(data.to(DEVICE), kind, torch.float32).cpu()
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
        if not same.all():
            differing.append(kind.name)
        if kind.name in ("Q4_K", "Q6_K", "Q8_0"):
            large = data.to(DEVICE).repeat(64 * MIB // (4096 * block_size) or 1)
            dequantise(large, kind, torch.bfloat16)
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            values = dequantise(large, kind, torch.bfloat16)
            torch.cuda.synchronize()
            rates[f"{kind.name}_Gvalues_s"] = round(
                values.numel() / (time.perf_counter() - started_at) / 1e9, 1
            )
    return {"ok": not differing, "differing": differing, **rates}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.zeros(1, device=DEVICE)
    print(torch.cuda.get_device_name(DEVICE), "virtual memory:", supports_virtual_memory(DEVICE))
    case("arena", arena_memory, 64 if quick else 256)
    turns = 40 if quick else 170
    for page_bytes, num_pages in ((16 * KIB, 8), (256 * KIB, 8), (2 * MIB, 1)):
        case(f"ordered {page_bytes // KIB} KiB", ordered_copies, page_bytes, num_pages, turns)
    case("pinning", pinning, GIB if quick else 4 * GIB)
    for page_bytes in (16 * KIB, 64 * KIB, 256 * KIB):
        for programs in (4, 8, 16, 32, 64):
            name = f"kernel {page_bytes // KIB} KiB, {programs} programs"
            case(name, kernel_rates, page_bytes, programs)
    total = GIB // 8 if quick else GIB // 2
    for page_bytes in (16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB):
        size = min(total, 2048 * page_bytes)
        case(f"copies {page_bytes // KIB} KiB", copy_rates, page_bytes, size, False)
    case("copies 256 KiB, neighbours", copy_rates, 256 * KIB, total, True)
    case("weights", weights, GIB // 2 if quick else 2 * GIB)
    case("gguf", gguf_values)
    print(f"{len(failures)} wrong: {', '.join(failures)}" if failures else "all right", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
