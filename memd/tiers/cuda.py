"""Copies pages between a CUDA device and pinned host memory, on two streams of their own.

Nothing here waits and no thread copies: `start` enqueues, `poll` asks events. Order is kept by the
device itself, in both directions. A copy begins when the work enqueued before `start` has ended:
the step that wrote a page going out, and every step that read the page that one coming in replaces.
A copy that has been reported has ended, so whatever the engine enqueues after a report finds a page
that came in complete, and may overwrite a page that went out.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

import torch

from memd.errors import OutOfDeviceMemory
from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.pinned import PinnedRegion, SlotLayout
from memd.types import SlotId, TransferId, TransferPath

logger = logging.getLogger(__name__)

P = ParamSpec("P")

# Below this a copy costs more to enqueue (8-10 us) than to make: pages of 256 KiB came to 9-17 GB/s
# one by one, to 51 by a kernel.
KERNEL_BELOW_BYTES = 512 * 2**10
KERNEL_ALIGNMENT = 16
# A launch and its table cost as much host time as a few copies.
KERNEL_FROM_RUNS = 4
# Copies are reported in groups of about this size, 0.3 ms of the link each.
GROUP_BYTES = 16 * 2**20

CopyPages = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Pages of one format that are neighbours on both sides: one copy."""

    device_offset: int
    host_offset: int
    page_bytes: int
    transfers: list[Transfer]

    @property
    def size_bytes(self) -> int:
        """Of all its pages."""
        return len(self.transfers) * self.page_bytes


def merge(transfers: Sequence[Transfer], layout: KVLayout, slots: SlotLayout) -> list[Run]:
    """Put neighbours together. A run stays within a block and a chunk, each mapped on its own.

    A packed page in a slot leaves the rest of it unused: it is a run of its own.

    Args:
        transfers: Of one path.
        layout: Of device pages.
        slots: Of host slots.

    Returns:
        Runs by device address.
    """
    runs: list[Run] = []
    before: Transfer | None = None
    for transfer in sorted(transfers, key=lambda transfer: transfer.page):
        if (
            before is None
            or transfer.packed
            or transfer.page != before.page + 1
            or transfer.slot != before.slot + 1
            or layout.block_of(transfer.page) != layout.block_of(before.page)
            or slots.chunk_of(transfer.slot) != slots.chunk_of(before.slot)
        ):
            device_offset = layout.page_offset_bytes(transfer.page, transfer.packed)
            host_offset = slots.offset_bytes(transfer.slot)
            page_bytes = layout.size_bytes(transfer.packed)
            runs.append(Run(device_offset, host_offset, page_bytes, []))
        runs[-1].transfers.append(transfer)
        before = transfer
    return runs


@dataclass(slots=True)
class _Lane:
    """One direction: its stream, and what has been enqueued there and not reported."""

    stream: torch.cuda.Stream
    groups: deque[tuple[torch.cuda.Event, list[TransferId]]] = field(default_factory=deque)


class CudaHostCopier:
    """The copier between a CUDA arena and host memory. Engine thread only.

    The compute stream is the one that is current on the device when `start` is called.

    Args:
        copy_pages: Copies many small pages in one launch: `memd_kernels.copy_host_pages`.
    """

    def __init__(self, copy_pages: CopyPages) -> None:
        self._copy_pages = copy_pages
        self._region: PinnedRegion | None = None
        self._failed: list[TransferId] = []
        # Copies out whose slots are not pinned yet, with the work that they have to follow.
        self._waiting: list[tuple[torch.cuda.Event, list[Transfer]]] = []

    def open(self, device: torch.Tensor, layout: KVLayout, num_slots: int) -> None:
        """Remember where pages are and make the streams. Host memory comes with the first copy."""
        self._device = device
        self._layout = layout
        self._slots = SlotLayout(layout.page_bytes, num_slots)
        self._lanes: dict[TransferPath, _Lane] = {
            "d2h": _Lane(torch.cuda.Stream(device.device)),
            "h2d": _Lane(torch.cuda.Stream(device.device)),
        }
        self._warm_up()

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begin copies, each after the work that is enqueued on the compute stream now."""
        if not transfers:
            return
        try:
            if self._region is None:
                self._region = self._open_region()
            enqueued = torch.cuda.Event()
            enqueued.record(torch.cuda.current_stream(self._device.device))
        except Exception:
            logger.exception("copies cannot be made")
            self._failed += [transfer.id for transfer in transfers]
            return
        self._begin(enqueued, transfers)

    def slot(self, slot: SlotId) -> torch.Tensor | None:
        """The memory of a slot that no copy uses now, uint8 `[page_bytes]`; None: not pinned yet.

        Raises:
            OutOfDeviceMemory: it cannot be pinned, or the host has no room for the region.
        """
        if self._region is None:
            self._region = self._open_region()
        if slot < self._slots.num_slots and self._region.want(slot):
            return self._host.narrow(0, self._slots.offset_bytes(slot), self._slots.page_bytes)
        if self._region.failed or slot >= self._slots.num_slots:
            raise OutOfDeviceMemory(f"host slot {slot} cannot be pinned")
        return None

    def poll(self) -> list[tuple[TransferId, bool]]:
        """Transfers that have ended since the last call, and whether they succeeded."""
        if self._waiting and self._region is not None and self._region.changed():
            waiting, self._waiting = self._waiting, []
            for enqueued, transfers in waiting:
                self._begin(enqueued, transfers)
        ended = [(transfer_id, False) for transfer_id in self._failed]
        self._failed.clear()
        for lane in self._lanes.values():
            while lane.groups:
                done, ids = lane.groups[0]
                try:
                    if not done.query():
                        break
                    succeeded = True
                except Exception:
                    logger.exception("copies failed on the device")
                    succeeded = False
                lane.groups.popleft()
                ended += [(transfer_id, succeeded) for transfer_id in ids]
        return ended

    def close(self) -> None:
        """Wait for what is under way, report nothing of it, and give the host memory back."""
        for lane in self._lanes.values():
            lane.stream.synchronize()
            lane.groups.clear()
        self._waiting.clear()
        if self._region is not None:
            self._region.close()
            self._region = None

    def _warm_up(self) -> None:
        """Compile the kernel now and not during a step."""
        start = torch.zeros(1, dtype=torch.int64, device=self._device.device)
        for size in {self._layout.page_bytes, self._layout.packed_page_bytes}:
            if size is not None and _suits_kernel(size):
                source, target = torch.zeros((2, size), dtype=torch.uint8, device=start.device)
                self._copy_pages(source, target, start, start, size)

    def _open_region(self) -> PinnedRegion:
        region = PinnedRegion(self._slots, self._register, _unregister)
        self._host = region.open()
        return region

    def _register(self, address: int, size_bytes: int) -> None:
        # Without the device set, this thread would create a context on the first one.
        with torch.cuda.device(self._device.device):
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
            )

    def _begin(self, enqueued: torch.cuda.Event, transfers: Sequence[Transfer]) -> None:
        """Enqueue what has pinned slots, keep the rest."""
        region = self._region
        assert region is not None
        ready: dict[TransferPath, list[Transfer]] = {"d2h": [], "h2d": []}
        later: list[Transfer] = []
        for transfer in transfers:
            exists = transfer.slot < self._slots.num_slots
            if exists and region.want(transfer.slot):
                ready[transfer.path].append(transfer)
            elif exists and not region.failed:
                later.append(transfer)
            else:
                self._failed.append(transfer.id)
        if later:
            self._waiting.append((enqueued, later))
        for path, pages in ready.items():
            if pages:
                self._enqueue(path, enqueued, pages)

    def _enqueue(
        self, path: TransferPath, enqueued: torch.cuda.Event, transfers: list[Transfer]
    ) -> None:
        lane = self._lanes[path]
        ids = [transfer.id for transfer in transfers]
        with torch.cuda.stream(lane.stream):
            if not self._attempt(ids, lane.stream.wait_event, enqueued):
                return
            for group in _groups(merge(transfers, self._layout, self._slots)):
                ids = self._copy_group(path, group)
                done = torch.cuda.Event()
                if ids and self._attempt(ids, done.record, lane.stream):
                    lane.groups.append((done, ids))

    def _copy_group(self, path: TransferPath, runs: list[Run]) -> list[TransferId]:
        """Enqueue copies; returns the transfers under way. Those that are not are booked failed."""
        single: list[Run] = []
        alike: dict[int, list[Run]] = defaultdict(list)  # for the kernel, by the size of a page
        for run in runs:
            small = run.size_bytes < KERNEL_BELOW_BYTES and _suits_kernel(run.page_bytes)
            (alike[run.page_bytes] if small else single).append(run)
        for size in [size for size, few in alike.items() if len(few) < KERNEL_FROM_RUNS]:
            single += alike.pop(size)
        under_way: list[TransferId] = []
        for run in single:
            ids = [transfer.id for transfer in run.transfers]
            if self._attempt(ids, self._copy_run, path, run):
                under_way += ids
        for size, many in alike.items():
            ids = [transfer.id for run in many for transfer in run.transfers]
            if self._attempt(ids, self._copy_small, path, many, size):
                under_way += ids
        return under_way

    def _attempt(
        self, ids: list[TransferId], enqueue: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Whether something could be enqueued; if not, the transfers behind it have failed."""
        try:
            enqueue(*args, **kwargs)
        except Exception:
            logger.exception("copies of %d pages cannot be enqueued", len(ids))
            self._failed += ids
            return False
        return True

    def _copy_run(self, path: TransferPath, run: Run) -> None:
        page = self._device.narrow(0, run.device_offset, run.size_bytes)
        slot = self._host.narrow(0, run.host_offset, run.size_bytes)
        source, target = (page, slot) if path == "d2h" else (slot, page)
        target.copy_(source, non_blocking=True)

    def _copy_small(self, path: TransferPath, runs: list[Run], size: int) -> None:
        starts = [(run, offset) for run in runs for offset in range(0, run.size_bytes, size)]
        rows = [
            [run.device_offset + offset for run, offset in starts],
            [run.host_offset + offset for run, offset in starts],
        ]
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
        pages, slots = table.to(self._device.device, non_blocking=True)
        if path == "d2h":
            self._copy_pages(self._device, self._host, pages, slots, size)
        else:
            self._copy_pages(self._host, self._device, slots, pages, size)


def _suits_kernel(page_bytes: int) -> bool:
    """Whether a page alone is too small for a copy of its own."""
    return page_bytes < KERNEL_BELOW_BYTES and page_bytes % KERNEL_ALIGNMENT == 0


def _groups(runs: list[Run]) -> Iterator[list[Run]]:
    """Runs in groups of about GROUP_BYTES."""
    group: list[Run] = []
    size_bytes = 0
    for run in runs:
        group.append(run)
        size_bytes += run.size_bytes
        if size_bytes >= GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _unregister(address: int) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
