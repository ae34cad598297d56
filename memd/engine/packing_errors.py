"""What packing loses, as it is measured page by page while the engine serves.

The device measures each packing (`memd_kernels.pack_pages`); its figures are summed there and come
to the host behind the work of a step, so that nothing waits for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_RELATIVE_ERROR = 1.0  # of a page that lost more, or holds what is no number
WINDOW_PACKINGS = 8  # over which the loss of a head is averaged before it is judged


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Figures on their way to the host: the sum of each head, then the largest of a page."""

    figures: Tensor
    pages: int
    packings: int
    arrived: torch.cuda.Event | None  # None: they are there


class PackingErrors:
    """Relative errors of keys and values, by layer and KV head. Engine thread only.

    Attributes:
        pages: Pages that have been measured and told of.
        worst: Largest error of one page, layer and head, of keys or values.
        recent: Mean error over the last `WINDOW_PACKINGS` packings or more, of the layer and head
            that lost most; None: there were not so many yet.
    """

    def __init__(self) -> None:
        self.pages = 0
        self.worst = 0.0
        self.recent: float | None = None
        self._sum = 0.0  # over pages, of the mean over layers and heads
        self._window: Tensor | None = None  # [layers * heads * 2], float64, sum over its pages
        self._window_pages = self._window_packings = 0
        self._pending: list[Tensor] = []
        self._arriving: _Arriving | None = None

    @property
    def mean(self) -> float | None:
        """Mean error over all pages, layers and heads; None: no page was packed yet."""
        return self._sum / self.pages if self.pages else None

    def add(self, errors: Tensor) -> None:
        """Keep what one packing has lost.

        Args:
            errors: [pages, num_layers, num_kv_heads, 2], float32, from `pack_pages`.
        """
        self._pending.append(errors)

    def collect(self) -> None:
        """Take in what has arrived, and ask for what was added since; never waits."""
        arriving = self._arriving
        if arriving is not None and (arriving.arrived is None or arriving.arrived.query()):
            self._take_in(arriving)
            self._arriving = None
        if self._arriving is None and self._pending:
            self._arriving = _ask_for(self._pending)
            self._pending = []
            if self._arriving.arrived is None:
                self.collect()

    def _take_in(self, arriving: _Arriving) -> None:
        figures = arriving.figures.double()
        sums, worst = figures[:-1], float(figures[-1])
        self.pages += arriving.pages
        self._sum += float(sums.mean())
        self.worst = max(self.worst, worst)
        self._window = sums if self._window is None else self._window + sums
        self._window_pages += arriving.pages
        self._window_packings += arriving.packings
        if self._window_packings >= WINDOW_PACKINGS:
            self.recent = float(self._window.max()) / self._window_pages
            self._window, self._window_pages, self._window_packings = None, 0, 0


def _ask_for(pending: list[Tensor]) -> _Arriving:
    """Sum up on the device, and begin to bring the sums to the host."""
    with torch.inference_mode():
        errors = torch.cat(pending).clamp(max=MOST_RELATIVE_ERROR)
        figures = torch.cat((errors.sum(0).flatten(), errors.max()[None]))
        if not figures.is_cuda:
            return _Arriving(figures, len(errors), len(pending), None)
        on_host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        on_host.copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Arriving(on_host, len(errors), len(pending), arrived)
