"""Leaves room on the device for others: caps the pool by what the device has free."""

from collections.abc import Callable

LOOK_SECONDS = 0.5
RELIEF = 1.25  # of the reserve must be free before the pool grows again: it does not flap


class Pressure:
    """Watches the device's free memory, as other processes leave it.

    Below the reserve the pool is to give up what is missing; it may grow again only into what is
    free beyond the reserve and a quarter more.

    Args:
        free_bytes: Of the device; raises OSError where nobody tells.
        block_bytes: Of a block of the pool.
        clock: Monotonic seconds.

    Attributes:
        reserve_bytes: Left free for others; 0: nothing is. May be set while running.
        device_free_bytes: As last seen; None: not known.
        active: The pool is to give memory up.
    """

    def __init__(
        self, free_bytes: Callable[[], int], block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.reserve_bytes = 0
        self.device_free_bytes: int | None = None
        self.active = False
        self.cap_blocks: int | None = None
        self._free_bytes = free_bytes
        self._block_bytes = block_bytes
        self._clock = clock
        self._looked_at: float | None = None

    def look(self, committed_blocks: int) -> None:
        """See what is free, every LOOK_SECONDS at most, and set `cap_blocks`; None: no cap.

        Args:
            committed_blocks: Blocks that the pool has from the device.
        """
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            self.device_free_bytes = self._free_bytes()
        except OSError:
            self.device_free_bytes = None
        free, relief = self.device_free_bytes, int(self.reserve_bytes * RELIEF)
        if free is None or not self.reserve_bytes:
            self.active, self.cap_blocks = False, None
        elif free < self.reserve_bytes:
            self.active = True
            missing = -(-(relief - free) // self._block_bytes)
            self.cap_blocks = max(1, committed_blocks - missing)
        elif free >= relief:
            self.active = False
            self.cap_blocks = max(1, committed_blocks + (free - relief) // self._block_bytes)
        elif not self.active:
            self.cap_blocks = max(1, committed_blocks)
