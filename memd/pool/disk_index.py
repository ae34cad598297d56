"""Which pages have a file on disk, how much room they take, and which goes first."""

from collections import OrderedDict
from collections.abc import Iterable

FILE_SYSTEM_BYTES = 4096  # room on disk comes in these; a folder takes one, too
FOLDERS = 16  # few, as each takes room even when it is empty
ENTRY_BYTES = 128  # of a file in its folder
TOUCH_INTERVAL_SECONDS = 60.0  # how exact the times of last use are that outlive the process


def folder_of(key: bytes) -> int:
    """The number of the folder of a key's file."""
    return key[0] >> 4


def room_of(file_bytes: int) -> int:
    """Room that a file takes on disk, with its entry in the folder."""
    return -(-(file_bytes + ENTRY_BYTES) // FILE_SYSTEM_BYTES) * FILE_SYSTEM_BYTES


class DiskIndex:
    """Keys of page files, least recently used first to go. O(1) operations, no I/O.

    Args:
        file_bytes: Size of the file of a full page.
        limit_bytes: Most room that files and their folders may take.
        packed_file_bytes: Size of the file of a packed page; 0: there are none.

    Attributes:
        packed: Those of the keys whose files hold packed pages.
    """

    def __init__(self, file_bytes: int, limit_bytes: int, packed_file_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.page_bytes = room_of(file_bytes)
        self.packed_page_bytes = room_of(packed_file_bytes)
        self.complete = False  # what the directory held at the start is all here
        self.packed: set[bytes] = set()
        self._touched_at: OrderedDict[bytes, float | None] = OrderedDict()
        self._folders: set[int] = set()  # numbers of those that are there

    def __len__(self) -> int:
        return len(self._touched_at)

    def __contains__(self, key: bytes) -> bool:
        return key in self._touched_at

    def capacity_pages(self, packed: bool = False) -> int:
        """Pages of one format that fit below the limit, whichever folders they are in."""
        room_bytes = self.limit_bytes - (FOLDERS + 2) * FILE_SYSTEM_BYTES
        return max(0, room_bytes // self._room_bytes(packed))

    def oldest_first(self) -> Iterable[bytes]:
        """Of all files, next to go first."""
        return self._touched_at.keys()

    @property
    def used_bytes(self) -> int:
        """Room taken on disk, with the folders and the lock."""
        overhead = (len(self._folders) + 2) * FILE_SYSTEM_BYTES
        saved = len(self.packed) * (self.page_bytes - self.packed_page_bytes)
        return len(self._touched_at) * self.page_bytes - saved + overhead

    def found(self, keys: tuple[bytes, ...], packed: frozenset[bytes] = frozenset()) -> None:
        """Files that were there at the start; each used before those that are known by now.

        Args:
            packed: Those of the keys whose files hold packed pages.
        """
        for key in keys:
            if key not in self._touched_at:
                if key in packed:
                    self.packed.add(key)
                self._touched_at[key] = None
                self._touched_at.move_to_end(key, last=False)
                self._folders.add(folder_of(key))

    def add(self, key: bytes, now: float, packed: bool = False) -> None:
        """A file is written, or about to be: it takes its room from now on."""
        self.discard(key)
        if packed:
            self.packed.add(key)
        self._touched_at[key] = now
        self._folders.add(folder_of(key))

    def discard(self, key: bytes) -> None:
        """A file is gone, if it was there."""
        self._touched_at.pop(key, None)
        self.packed.discard(key)

    def use(self, key: bytes, now: float) -> bool:
        """A file's page was used; returns whether the file's own time should be renewed."""
        if key not in self._touched_at:
            return False
        self._touched_at.move_to_end(key)
        touched_at = self._touched_at[key]
        if touched_at is not None and now - touched_at < TOUCH_INTERVAL_SECONDS:
            return False
        self._touched_at[key] = now
        return True

    def make_room(
        self, key: bytes | None, kept: set[bytes], packed: bool = False
    ) -> tuple[bytes, ...] | None:
        """Take out the oldest so that a new file fits below the limit.

        Args:
            key: Of the new file, which may take the place of another of the same page; None: only
                what exceeds the limit goes.
            kept: Not to go: they are being read or written.
            packed: Whether the new file holds a packed page.

        Returns:
            Keys of files to remove; None if the new one does not fit even so, and nothing changed.
        """
        wanted_bytes = 0
        if key is not None:
            folder = 0 if folder_of(key) in self._folders else FILE_SYSTEM_BYTES
            wanted_bytes = self._room_bytes(packed) + folder
            if key in self._touched_at:
                wanted_bytes -= self._room_bytes(key in self.packed)
        excess_bytes = self.used_bytes + wanted_bytes - self.limit_bytes
        victims: list[bytes] = []
        for victim in self._touched_at:
            if excess_bytes <= 0:
                break
            if victim != key and victim not in kept:
                victims.append(victim)
                excess_bytes -= self._room_bytes(victim in self.packed)
        if key is not None and excess_bytes > 0:
            return None
        for victim in victims:
            self.discard(victim)
        return tuple(victims)

    def _room_bytes(self, packed: bool) -> int:
        return self.packed_page_bytes if packed else self.page_bytes
