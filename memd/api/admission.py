"""The door to the queue: a request that would wait behind too many is told when to come back."""

import math
import time
from collections import deque
from collections.abc import Callable

from memd.api.engine_client import EngineClient
from memd.api.errors import ApiError
from memd.observe.tenant_metrics import Rejections
from memd.settings import LiveSettings

_WINDOW_SECONDS = 30.0  # over which the rate of finishing is taken
_SAMPLE_SECONDS = 1.0
_LONGEST_SECONDS = 60  # clients ignore a longer Retry-After


class Admission:
    """Compares the queue with `engine.max_waiting`.

    Args:
        engine: Knows the open sequences, how many of them run and how many have ended.
        live: The settings in force.
        rejections: Where refusals are counted.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        live: LiveSettings,
        rejections: Rejections,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._live = live
        self.rejections = rejections
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # when, sequences ended until then

    def check(self, new: int, tenant: str = "") -> None:
        """Let `new` more sequences of a tenant in, or not. An empty queue takes any number.

        Raises:
            ApiError: 429 with `Retry-After`.
        """
        self._sample()
        running = self._engine.snapshot.running if self._engine.snapshot else 0
        waiting = len(self._engine.open) - running
        limit = self._live.current.engine.max_waiting
        if waiting <= 0 or waiting + new <= limit:
            return
        over = self._over_quota(tenant)
        self.rejections.count(tenant, "quota" if over else "queue")
        raise ApiError(
            429,
            f"{waiting} sequences wait already and {new} more were asked for, the limit is {limit}"
            + (f"; the tenant {tenant} is above its quota of pages" if over else ""),
            "tenant_quota_exceeded" if over else "overloaded",
            headers={
                "retry-after": str(self._retry_after(waiting)),
                "x-should-retry": "true",
            },
        )

    def _over_quota(self, tenant: str) -> bool:
        snapshot = self._engine.snapshot
        found = snapshot.tenants.get(tenant) if snapshot is not None else None
        quota = found.quota_pages if found is not None else None
        return found is not None and quota is not None and found.used_pages > quota

    def _sample(self) -> None:
        now = self._clock()
        while self._samples and now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.popleft()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append((now, self._engine.ended))

    def _retry_after(self, waiting: int) -> int:
        """Whole seconds: half of what the queue needs, so that it does not run dry meanwhile."""
        since, ended_then = self._samples[0]
        elapsed = max(self._clock() - since, _SAMPLE_SECONDS)
        ended = max(self._engine.ended - ended_then, 1)  # none yet: one may end just now
        return max(1, min(_LONGEST_SECONDS, math.ceil(waiting * elapsed / ended / 2)))
