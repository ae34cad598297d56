"""The disk tier's decisions: what is written, what is read, what goes when the room is used up.

A page on disk is found by its key and needs no node in the tree. It comes and goes through a host
slot: what is read becomes a host copy first, what is written was one. Orders go to whoever reads
and writes the files (memd.tiers.disk), who reports each as ended; nothing here touches a file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from memd.pool.counters import PoolCounters
from memd.pool.disk_index import DiskIndex
from memd.pool.files import (
    FileChanges,
    FileOrder,
    FileReport,
    FileTransfer,
    IndexReport,
    PageFile,
)
from memd.pool.host_slots import HostSlots
from memd.pool.keys import page_key
from memd.pool.prefix_tree import Node, PrefixTree
from memd.types import DiskFault, TransferId

MAX_FOUND = 256  # pages looked for in one lookup: bounds its cost
MAX_WANTED = 65_536  # pages that wait to be written
PAUSE_SECONDS = (1.0, 60.0)  # the first after a fault, and the longest of those that follow


@dataclass(slots=True)
class FileMove:
    """A transfer under way. `node` is None once its host copy is not wanted any more."""

    transfer: FileTransfer
    node: Node | None
    ordered_at: float  # monotonic seconds


class DiskTier:
    """Books what is on disk, on its way there, and on its way back. Off until `open`.

    After a fault of the file system nothing is read or written for a while: what would be is
    dropped and counted, and requests compute what they need.

    Args:
        tree, host, counters: Of the pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        tree: PrefixTree,
        host: HostSlots,
        counters: PoolCounters,
        clock: Callable[[], float],
    ) -> None:
        self.index = DiskIndex(0, 0)
        self.expensive_tokens = 1
        self.reading: dict[Node, TransferId] = {}
        self.writing: dict[bytes, TransferId] = {}
        self.under_way: dict[TransferId, FileMove] = {}
        self.wanted: dict[Node, None] = {}  # to be written, in this order
        self.is_open = False
        self._tree = tree
        self._host = host
        self._counters = counters
        self._clock = clock
        self._orders: list[FileOrder] = []
        self._serial = 0
        self._paused_until = 0.0
        self._pause_seconds = 0.0
        self._fault: DiskFault | None = None
        self._unwanted: set[bytes] = set()  # being written, and to be removed again

    def open(
        self, file_bytes: int, limit_bytes: int, staging_pages: int, packed_file_bytes: int = 0
    ) -> None:
        """Begin: what the directory holds is told in reports.

        Args:
            file_bytes: Size of a full page's file.
            limit_bytes: Most room that files may take.
            staging_pages: Host slots for pages on their way, beyond those of the host tier.
            packed_file_bytes: Size of a packed page's file; 0: there are none.
        """
        self.index = DiskIndex(file_bytes, limit_bytes, packed_file_bytes)
        self._host.staging = staging_pages
        self.is_open = True

    @property
    def limit_bytes(self) -> int:
        """Most room that files may take; lowering it removes what exceeds it."""
        return self.index.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self.index.limit_bytes = limit_bytes
        self._trim()

    @property
    def busy(self) -> bool:
        """Whether something is under way or can be begun."""
        scanning = self.is_open and not self.index.complete
        return bool(scanning or self.under_way or self.wanted or self._orders)

    @property
    def fault(self) -> DiskFault | None:
        """Why nothing is read or written at present."""
        return self._fault if self._clock() < self._paused_until else None

    @property
    def passing_slots(self) -> int:
        """Slots beyond the host tier's that pages to be written may take; reads have the rest."""
        return (self._host.staging + 1) // 2

    def take_orders(self) -> list[FileOrder]:
        """Orders given since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders

    def moving(self) -> list[Node | None]:
        """The nodes of all transfers under way."""
        return [move.node for move in self.under_way.values()]

    def holds(self, key: bytes) -> bool:
        """Whether a page's file is there."""
        return key in self.index and key not in self.writing

    def find(self, key: bytes, data: bytes) -> tuple[PageFile, ...]:
        """The files of the full pages that continue a prefix. O(pages found), no I/O.

        Args:
            key: Of the page or root before them.
            data: The tokens that follow it.
        """
        if not len(self.index) or self.fault is not None:
            return ()
        size = self._tree.page_bytes
        files: list[PageFile] = []
        for start in range(0, min(len(data), MAX_FOUND * size) - size + 1, size):
            tokens = data[start : start + size]
            parent, key = key, page_key(key, tokens)
            if not self.holds(key):
                break
            files.append(PageFile(key, parent, tokens, key in self.index.packed))
        return tuple(files)

    def computed(self, node: Node, num_tokens: int, num_pages: int) -> None:
        """A prefix was computed up to a full page's node; an expensive one is written.

        Args:
            num_tokens: Length of the prefix.
            num_pages: How many of its last pages are new.
        """
        if not self.is_open or num_tokens < self.expensive_tokens:
            return
        if self._refused(num_pages):
            return
        path: list[Node] = []
        while not node.is_root:
            if node not in self.wanted and node.key not in self.index:
                path.append(node)
            elif num_pages <= 0:
                break  # what precedes it has been seen to
            num_pages -= 1
            node = self._tree.page_parent(node)
        self.wanted |= dict.fromkeys(reversed(path))

    def used(self, node: Node) -> None:
        """A request found a page that was computed before: it is worth its room on disk."""
        if not self.is_open:
            return
        if node.key not in self.index:
            if not self._refused(1):
                self.wanted[node] = None
        elif self.index.use(node.key, self._clock()):
            self._orders.append(FileChanges(touch=(node.key,)))

    def repacked(self, node: Node) -> None:
        """A page was packed: a file of it that holds a full page is written anew, to take less room
        and to come back as what the requests of this engine have seen.
        """
        if node.key in self.index and node.key not in self.index.packed and not self._refused(1):
            self.wanted[node] = None

    def has(self, node: Node, packed: bool) -> bool:
        """Whether a page need not be written: its file is there, or being written, in the format
        that it has now, or packed already.
        """
        return node.key in self.index and (not packed or node.key in self.index.packed)

    def being_read(self) -> set[bytes]:
        """The keys of files that are being read, for whomever."""
        transfers = (move.transfer for move in self.under_way.values())
        return {transfer.file.key for transfer in transfers if transfer.path == "f2h"}

    def write(self, node: Node) -> None:
        """Order to write a host copy; what has to go for it goes before, a file of the same page
        in another format as well.
        """
        assert node.host is not None
        parent = self._tree.page_parent(node)
        packed = node.host in self._host.packed
        file = PageFile(node.key, parent.key, self._tree.page_label(node), packed)
        removed = self.index.make_room(file.key, self._busy_keys(), packed)
        if removed is None:
            self._counters.disk_dropped["limit"] += 1
            return
        self._counters.disk_evicted += len(removed)
        if file.key in self.index:
            removed += (file.key,)
        self.index.add(file.key, self._clock(), packed)
        self._host.pin(node.host)
        transfer = FileTransfer(self._next(), "h2f", node.host, file, removed)
        self.writing[file.key] = transfer.id
        self._begin(transfer, node)

    def read(self, node: Node, file: PageFile) -> None:
        """Order to read a file into the host slot that a node has been given."""
        assert node.host is not None
        transfer = FileTransfer(self._next(), "f2h", node.host, file)
        self.reading[node] = transfer.id
        self._begin(transfer, node)

    def host_copy_gone(self, node: Node) -> None:
        """A node's host copy is given up; what uses it ends without effect on the node."""
        reads, writes = self.reading.pop(node, None), self.writing.get(node.key)
        if reads is not None:
            self.under_way[reads].node = None
            self._counters.prefetched["cancelled"] += 1
        if writes is not None:
            self.under_way[writes].node = None

    def finish(self, report: FileReport) -> FileMove | None:
        """A transfer has ended; returns it, or None if nobody waits for it."""
        move = self.under_way.pop(report.id, None)
        if move is None:
            self._counters.late_transfers += 1
            return None
        succeeded = report.fault is None and report.bad is None
        path, key = move.transfer.path, move.transfer.file.key
        seconds = self._clock() - move.ordered_at
        self._counters.count_transfer(path, succeeded, seconds, move.transfer.file.packed)
        self._host.unpin(move.transfer.slot)
        if path == "h2f":
            del self.writing[key]
            if succeeded and key in self._unwanted:
                self._orders.append(FileChanges(remove=(key,)))
            elif not succeeded:
                self.index.discard(key)
                self._counters.disk_dropped[report.fault or "failed"] += 1
            self._unwanted.discard(key)
        else:
            if move.node is not None:
                del self.reading[move.node]
            if report.bad is not None:
                self._counters.disk_rejected[report.bad] += 1
            if report.bad is not None or report.fault == "gone":
                self.index.discard(key)
            elif succeeded and self.index.use(key, self._clock()):
                self._orders.append(FileChanges(touch=(key,)))
        lost = path == "f2h" and report.fault == "gone"  # that file alone, as far as is known
        self._note(None if lost else report.fault, succeeded)
        self._trim()
        return move

    def found(self, report: IndexReport) -> None:
        """Learn what the directory held at the start."""
        self.index.found(report.keys, report.packed)
        for reason, count in report.rejected.items():
            self._counters.disk_rejected[reason] += count
        if report.fault is not None:  # what is in there is not known, so nothing can be added
            self._fault, self._paused_until = report.fault, math.inf
        if report.last:
            self.index.complete = True
            self._trim()

    def remove(self, keys: tuple[bytes, ...]) -> None:
        """Remove files, if they are there; one that is being written goes when it is."""
        keys = tuple(key for key in keys if key in self.index)
        for key in keys:
            self.index.discard(key)
        self._unwanted.update(key for key in keys if key in self.writing)
        gone = tuple(key for key in keys if key not in self.writing)
        if gone:
            self._orders.append(FileChanges(remove=gone))

    def clear(self) -> None:
        """Forget all of it and remove the files."""
        self.wanted.clear()
        self.remove(tuple(self.index.oldest_first()))

    def _refused(self, num_pages: int) -> bool:
        """Whether pages cannot be written at present; counts them."""
        reason = "busy" if len(self.wanted) >= MAX_WANTED else self.fault
        if reason is None:
            return False
        self._counters.disk_dropped[reason] += num_pages
        return True

    def _trim(self) -> None:
        """Remove what exceeds the limit."""
        if not self.index.complete:
            return
        removed = self.index.make_room(None, self._busy_keys())
        if removed:
            self._counters.disk_evicted += len(removed)
            self._orders.append(FileChanges(remove=removed))

    def _busy_keys(self) -> set[bytes]:
        return {move.transfer.file.key for move in self.under_way.values()}

    def _next(self) -> TransferId:
        self._serial -= 1  # apart from the numbers of copies
        return TransferId(self._serial)

    def _begin(self, transfer: FileTransfer, node: Node) -> None:
        self.under_way[transfer.id] = FileMove(transfer, node, self._clock())
        self._orders.append(transfer)

    def _note(self, fault: DiskFault | None, succeeded: bool) -> None:
        """Pause after a fault, longer each time; go on at once after a success."""
        if succeeded:
            self._pause_seconds, self._paused_until, self._fault = 0.0, 0.0, None
        elif fault is not None:
            self._pause(fault)

    def _pause(self, fault: DiskFault) -> None:
        now = self._clock()
        if now < self._paused_until:
            return
        first, longest = PAUSE_SECONDS
        self._pause_seconds = min(max(first, 2 * self._pause_seconds), longest)
        self._paused_until, self._fault = now + self._pause_seconds, fault
        self._counters.disk_dropped[fault] += len(self.wanted)
        self.wanted.clear()
