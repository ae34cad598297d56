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


class DiskIndex:
    """Keys of page files, least recently used first to go. O(1) operations, no I/O.

    Args:
        file_bytes: Size of one file; all are alike.
        limit_bytes: Most room that files and their folders may take.
    """

    def __init__(self, file_bytes: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.page_bytes = -(-(file_bytes + ENTRY_BYTES) // FILE_SYSTEM_BYTES) * FILE_SYSTEM_BYTES
        self.complete = False  # what the directory held at the start is all here
        self._touched_at: OrderedDict[bytes, float | None] = OrderedDict()
        self._folders: set[int] = set()  # numbers of those that are there

    def __len__(self) -> int:
        return len(self._touched_at)

    def __contains__(self, key: bytes) -> bool:
        return key in self._touched_at

    @property
    def capacity_pages(self) -> int:
        """Pages that fit below the limit, whichever folders they are in."""
        room_bytes = self.limit_bytes - (FOLDERS + 2) * FILE_SYSTEM_BYTES
        return max(0, room_bytes // self.page_bytes)

    def oldest_first(self) -> Iterable[bytes]:
        """Of all files, next to go first."""
        return self._touched_at.keys()

    @property
    def used_bytes(self) -> int:
        """Room taken on disk, with the folders and the lock."""
        overhead = (len(self._folders) + 2) * FILE_SYSTEM_BYTES
        return len(self._touched_at) * self.page_bytes + overhead

    def found(self, keys: tuple[bytes, ...]) -> None:
        """Files that were there at the start; each used before those that are known by now."""
        for key in keys:
            if key not in self._touched_at:
                self._touched_at[key] = None
                self._touched_at.move_to_end(key, last=False)
                self._folders.add(folder_of(key))

    def add(self, key: bytes, now: float) -> None:
        """A file is written, or about to be: it takes its room from now on."""
        self._touched_at[key] = now
        self._touched_at.move_to_end(key)
        self._folders.add(folder_of(key))

    def discard(self, key: bytes) -> None:
        """A file is gone, if it was there."""
        self._touched_at.pop(key, None)

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

    def make_room(self, key: bytes | None, kept: set[bytes]) -> tuple[bytes, ...] | None:
        """Take out the oldest so that a new file fits below the limit.

        Args:
            key: Of the new file; None: only what exceeds the limit goes.
            kept: Not to go: they are being read or written.

        Returns:
            Keys of files to remove; None if the new one does not fit even so, and nothing changed.
        """
        wanted_bytes = 0
        if key is not None:
            folder = 0 if folder_of(key) in self._folders else FILE_SYSTEM_BYTES
            wanted_bytes = self.page_bytes + folder
        excess = self.used_bytes + wanted_bytes - self.limit_bytes
        count = max(0, -(-excess // self.page_bytes))
        victims: list[bytes] = []
        for victim in self._touched_at:
            if len(victims) >= count:
                break
            if victim not in kept:
                victims.append(victim)
        if key is not None and len(victims) < count:
            return None
        for victim in victims:
            del self._touched_at[victim]
        return tuple(victims)
