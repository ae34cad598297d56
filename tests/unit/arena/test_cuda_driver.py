"""The arena's CUDA driver over a stand-in for the driver's functions: order, and undoing."""

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memd.arena.cuda import CudaDriver, supports_virtual_memory
from memd.errors import OutOfDeviceMemory

GRANULE = 2 * 2**20
BASE = 1 << 40


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_UNKNOWN = 999


class FakeCuda(ModuleType):
    """Virtual memory as the CUDA driver keeps it: handles, and mappings that keep memory alive."""

    CUresult = Result
    CUdeviceptr = int
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102
    )

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.reserved = 0
        self.failures: dict[str, Result] = {}

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        code = self.failures.get(name, Result.CUDA_SUCCESS)
        return (code, *values) if code == Result.CUDA_SUCCESS else (code, *[None] * len(values))

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._answer("cuInit")

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGet", ordinal)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetAttribute", int(attribute == 102))

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._answer("cuCtxSynchronize")

    def cuMemGetAllocationGranularity(self, properties: Any, kind: int) -> tuple[Any, ...]:
        return self._answer("cuMemGetAllocationGranularity", GRANULE)

    def cuMemAddressReserve(self, size: int, align: int, base: int, flags: int) -> tuple[Any, ...]:
        self.reserved = size
        return self._answer("cuMemAddressReserve", BASE)

    def cuMemAddressFree(self, base: int, size: int) -> tuple[Any, ...]:
        assert (base, size, self.mapped) == (BASE, self.reserved, {})
        self.reserved = 0
        return self._answer("cuMemAddressFree")

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        answer = self._answer("cuMemCreate", len(self.handles) + 1)
        if answer[0] == Result.CUDA_SUCCESS:
            self.handles[answer[1]] = size
        return answer

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        answer = self._answer("cuMemMap")
        if answer[0] == Result.CUDA_SUCCESS:
            assert self.handles[handle] == size
            assert address not in self.mapped
            self.mapped[address] = size
        return answer

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        del self.handles[handle]
        return self._answer("cuMemRelease")

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> Any:
        assert self.mapped[address] == size
        answer = self._answer("cuMemSetAccess")
        if answer[0] == Result.CUDA_SUCCESS:
            self.accessible.add(address)
        return answer

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.mapped.pop(address) == size
        self.accessible.discard(address)
        return self._answer("cuMemUnmap")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


@pytest.fixture
def driver(cuda: FakeCuda) -> CudaDriver:
    driver = CudaDriver(torch.device("cuda", 0))
    driver.reserve(8 * GRANULE)
    return driver


def test_blocks_come_and_go_alone(cuda: FakeCuda, driver: CudaDriver) -> None:
    """The first granule stays, because launchers ask about the first address of the range."""
    assert driver.granule_bytes == GRANULE
    assert cuda.mapped == {BASE: GRANULE}
    driver.commit(0, 2 * GRANULE)
    driver.commit(4 * GRANULE, 2 * GRANULE)
    assert cuda.mapped == {
        BASE: GRANULE,
        BASE + GRANULE: GRANULE,
        BASE + 4 * GRANULE: 2 * GRANULE,
    }
    assert cuda.accessible == set(cuda.mapped)
    assert cuda.handles == {}
    driver.decommit(0, 2 * GRANULE)
    assert cuda.mapped == {BASE: GRANULE, BASE + 4 * GRANULE: 2 * GRANULE}
    driver.commit(0, 2 * GRANULE)
    driver.close()
    assert (cuda.mapped, cuda.reserved) == ({}, 0)
    driver.close()


def test_a_first_block_of_one_granule(cuda: FakeCuda, driver: CudaDriver) -> None:
    driver.commit(0, GRANULE)
    driver.decommit(0, GRANULE)
    assert cuda.mapped == {BASE: GRANULE}


@pytest.mark.parametrize("step", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_commit_changes_nothing(cuda: FakeCuda, driver: CudaDriver, step: str) -> None:
    driver.commit(2 * GRANULE, 2 * GRANULE)
    before = dict(cuda.mapped)
    cuda.failures = {step: Result.CUDA_ERROR_OUT_OF_MEMORY}
    with pytest.raises(OutOfDeviceMemory):
        driver.commit(4 * GRANULE, 2 * GRANULE)
    assert (cuda.mapped, cuda.handles) == (before, {})
    cuda.failures = {}
    driver.commit(4 * GRANULE, 2 * GRANULE)
    assert cuda.mapped == before | {BASE + 4 * GRANULE: 2 * GRANULE}


def test_other_failures_are_not_taken_for_a_lack_of_memory(
    cuda: FakeCuda, driver: CudaDriver
) -> None:
    cuda.failures = {"cuMemMap": Result.CUDA_ERROR_UNKNOWN}
    with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
        driver.commit(2 * GRANULE, 2 * GRANULE)
    assert cuda.handles == {}


def test_a_range_that_cannot_be_had(cuda: FakeCuda) -> None:
    driver = CudaDriver(torch.device("cuda", 0))
    cuda.failures = {"cuMemCreate": Result.CUDA_ERROR_OUT_OF_MEMORY}
    with pytest.raises(OutOfDeviceMemory):
        driver.reserve(8 * GRANULE)
    assert (cuda.mapped, cuda.reserved) == ({}, 0)


def test_devices_without_virtual_memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert supports_virtual_memory(device)
    monkeypatch.setattr(FakeCuda, "cuDeviceGetAttribute", lambda *arguments: (0, 0))
    assert not supports_virtual_memory(device)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert not supports_virtual_memory(device)
