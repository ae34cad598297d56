"""Device memory as an arena: one reserved address range, memory mapped behind its blocks.

Kernels and captured CUDA graphs keep their addresses while blocks come and go, and what is given
back is the device's at once, for other processes too.
"""

import importlib
import logging
from types import ModuleType
from typing import Any

import torch

from memd.errors import OutOfDeviceMemory

logger = logging.getLogger(__name__)


class CudaDriver:
    """The driver for CUDA devices with virtual memory; see `supports_virtual_memory`.

    Each commit is an allocation of its own, so that every block can be given back alone. The
    device's context must exist before `reserve`; any torch operation on the device creates it.

    The range's first granule has memory from `reserve` to `close`: whoever takes the tensor over
    the range, torch or a kernel's launcher, asks the driver about its first address.

    Args:
        device: Where the memory is.

    Source:
        "Virtual Memory Management" in the CUDA driver API. A handle may be released as soon as it
        is mapped: the memory then lives as long as its mapping.
    """

    elastic = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: ModuleType | None = None
        self._granule_bytes = 0
        self._base = 0
        self._size_bytes = 0
        self._mapped: dict[int, int] = {}  # offset -> size; for `close`
        self._tensor: torch.Tensor | None = None

    @property
    def granule_bytes(self) -> int:
        """2 MiB on every device so far."""
        if not self._granule_bytes:
            cuda = self._api()
            kind = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            answer = cuda.cuMemGetAllocationGranularity(self._properties(), kind)
            self._granule_bytes = int(_checked(cuda, answer))
        return self._granule_bytes

    def reserve(self, size_bytes: int) -> None:
        """Reserve the range; takes addresses, and the memory of one granule.

        Raises:
            OutOfDeviceMemory: the device has no memory left, or not so many addresses.
        """
        cuda = self._api()
        answer = cuda.cuMemAddressReserve(size_bytes, self.granule_bytes, cuda.CUdeviceptr(0), 0)
        self._base = int(_checked(cuda, answer))
        self._size_bytes = size_bytes
        try:
            self._map(0, self.granule_bytes)
        except Exception:
            self.close()
            raise

    def commit(self, offset_bytes: int, size_bytes: int) -> None:
        """Put memory behind a part of the range. About 50 us; kernels in flight go on.

        Raises:
            OutOfDeviceMemory: the device has none left. Nothing has changed.
        """
        self._map(*self._beyond_first(offset_bytes, size_bytes))

    def decommit(self, offset_bytes: int, size_bytes: int) -> None:
        """Give a committed part back to the device; see `settle`."""
        self._unmap(*self._beyond_first(offset_bytes, size_bytes))

    def settle(self) -> None:
        """Wait for the work enqueued so far: it may read pages that are free already."""
        cuda = self._api()
        _checked(cuda, cuda.cuCtxSynchronize())

    def tensor(self) -> torch.Tensor:
        """The whole range, uint8 `[size_bytes]`. Parts without memory must not be touched."""
        if self._tensor is None:
            memory = _Range(self._base, self._size_bytes)
            self._tensor = torch.as_tensor(memory, device=self._device)
        return self._tensor

    def close(self) -> None:
        """Give memory and addresses back. No tensor over the range may be used afterwards."""
        if not self._base:
            return
        cuda = self._api()
        _checked(cuda, cuda.cuCtxSynchronize())
        for offset_bytes, size_bytes in list(self._mapped.items()):
            self._unmap(offset_bytes, size_bytes)
        _checked(cuda, cuda.cuMemAddressFree(self._base, self._size_bytes))
        self._base, self._tensor = 0, None

    def _beyond_first(self, offset_bytes: int, size_bytes: int) -> tuple[int, int]:
        """A part without the range's first granule."""
        start = max(offset_bytes, self.granule_bytes)
        return start, offset_bytes + size_bytes - start

    def _map(self, offset_bytes: int, size_bytes: int) -> None:
        if not size_bytes:
            return
        cuda = self._api()
        address = self._base + offset_bytes
        handle = _checked(cuda, cuda.cuMemCreate(size_bytes, self._properties(), 0))
        try:
            _checked(cuda, cuda.cuMemMap(address, size_bytes, 0, handle, 0))
        finally:  # mapped or not, the handle itself is of no more use
            _checked(cuda, cuda.cuMemRelease(handle))
        try:
            _checked(cuda, cuda.cuMemSetAccess(address, size_bytes, [self._access()], 1))
        except Exception:
            _checked(cuda, cuda.cuMemUnmap(address, size_bytes))
            raise
        self._mapped[offset_bytes] = size_bytes

    def _unmap(self, offset_bytes: int, size_bytes: int) -> None:
        if size_bytes:
            cuda = self._api()
            _checked(cuda, cuda.cuMemUnmap(self._base + offset_bytes, size_bytes))
            del self._mapped[offset_bytes]

    def _api(self) -> ModuleType:
        """The CUDA driver's functions, started. Imported late: only CUDA machines have them."""
        if self._driver is None:
            cuda = importlib.import_module("cuda.bindings.driver")
            _checked(cuda, cuda.cuInit(0))
            self._driver = cuda
        return self._driver

    def _location(self) -> Any:
        cuda = self._api()
        location = cuda.CUmemLocation()
        location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = _ordinal(self._device)
        return location

    def _properties(self) -> Any:
        cuda = self._api()
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location()
        return properties

    def _access(self) -> Any:
        cuda = self._api()
        access = cuda.CUmemAccessDesc()
        access.location = self._location()
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


def supports_virtual_memory(device: torch.device) -> bool:
    """Whether `CudaDriver` works on a CUDA device.

    It needs the package cuda-bindings, and a driver and device that map memory; some virtualised
    devices do not.
    """
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        logger.warning("memory cannot be given back to the device: %s", error)
        return False
    _checked(cuda, cuda.cuInit(0))
    handle = _checked(cuda, cuda.cuDeviceGet(_ordinal(device)))
    attributes = cuda.CUdevice_attribute
    wanted = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(_checked(cuda, cuda.cuDeviceGetAttribute(wanted, handle)))


class _Range:
    """Device memory as torch accepts it. The tensor holds this object, not the memory."""

    def __init__(self, base: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (base, False),
            "strides": None,
            "version": 3,
        }


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _checked(cuda: ModuleType, answer: tuple[Any, ...]) -> Any:
    """What a driver function returned beside its code.

    Raises:
        OutOfDeviceMemory: the device or its address space is full.
        RuntimeError: any other failure; the process is not to be trusted with the device then.
    """
    code, *values = answer
    if code == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfDeviceMemory("the device has no memory left")
    if code != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver answers {code!r}")
    return values[0] if values else None
