"""The arena on a CUDA device: memory comes and goes behind addresses that stay."""

from collections.abc import Iterator

import pytest
import torch

from memd.arena.cuda import CudaDriver, supports_virtual_memory
from memd.errors import OutOfDeviceMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 2**20
BLOCK = 16 * MIB
NUM_BLOCKS = 64
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    torch.zeros(1, device=DEVICE)
    if not supports_virtual_memory(DEVICE):
        pytest.skip("the device has no virtual memory")
    driver = CudaDriver(DEVICE)
    driver.reserve(NUM_BLOCKS * BLOCK)
    yield driver
    driver.close()


def free_bytes() -> int:
    return torch.cuda.mem_get_info(DEVICE)[0]


def part(driver: CudaDriver, block: int) -> torch.Tensor:
    return driver.tensor()[block * BLOCK : (block + 1) * BLOCK].view(torch.int32)


def test_memory_is_taken_and_given_back(driver: CudaDriver) -> None:
    assert driver.tensor().shape == (NUM_BLOCKS * BLOCK,)
    # The allocator keeps what looking at a block takes: it should have it before.
    assert (torch.zeros(BLOCK // 4, dtype=torch.int32, device=DEVICE) == 0).all()
    before = free_bytes()
    for block in range(NUM_BLOCKS):
        driver.commit(block * BLOCK, BLOCK)
    first_granule = driver.granule_bytes
    assert before - free_bytes() >= NUM_BLOCKS * BLOCK - first_granule
    for block in range(NUM_BLOCKS):
        part(driver, block).fill_(block)
    for block in range(NUM_BLOCKS):
        assert (part(driver, block) == block).all()
    for block in range(0, NUM_BLOCKS, 2):
        driver.decommit(block * BLOCK, BLOCK)
    assert before - free_bytes() <= NUM_BLOCKS // 2 * BLOCK + BLOCK
    assert all((part(driver, block) == block).all() for block in range(1, NUM_BLOCKS, 2))
    for block in range(1, NUM_BLOCKS, 2):
        driver.decommit(block * BLOCK, BLOCK)
    assert before - free_bytes() < BLOCK


def test_a_graph_outlives_blocks(driver: CudaDriver) -> None:
    for block in range(4):
        driver.commit(block * BLOCK, BLOCK)
    first = part(driver, 0)
    other = part(driver, 3)
    table = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    words = driver.tensor().view(torch.int32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = words[table]
    first.fill_(7)
    other.fill_(8)
    for offset, want in ((0, 7), (3 * BLOCK // 4, 8)):
        table.fill_(offset)
        graph.replay()
        assert found.item() == want
        driver.commit((offset % 7 + 10) * BLOCK, BLOCK)
    driver.decommit(3 * BLOCK, BLOCK)
    driver.commit(3 * BLOCK, BLOCK)
    part(driver, 3).fill_(9)
    graph.replay()
    assert found.item() == 9


def test_a_step_in_flight_has_read_what_is_given_back_once_settled(driver: CudaDriver) -> None:
    driver.commit(BLOCK, BLOCK)
    part(driver, 1).fill_(5)
    torch.cuda._sleep(20_000_000)
    copy = part(driver, 1).clone()
    driver.settle()
    driver.decommit(BLOCK, BLOCK)
    assert (copy == 5).all()


def test_a_full_device_refuses_and_nothing_changes() -> None:
    driver = CudaDriver(DEVICE)
    size = -(-2 * torch.cuda.mem_get_info(DEVICE)[1] // driver.granule_bytes) * driver.granule_bytes
    driver.reserve(size)
    before = free_bytes()
    with pytest.raises(OutOfDeviceMemory):
        driver.commit(driver.granule_bytes, size - driver.granule_bytes)
    assert free_bytes() == before
    driver.commit(0, 2 * driver.granule_bytes)
    driver.tensor()[: 2 * driver.granule_bytes].fill_(1)
    driver.close()
