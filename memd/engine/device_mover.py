"""Copies pages on the device: from place to place, and from full to packed."""

from collections.abc import Sequence

import memd_kernels as kernels
import numpy as np
import torch
from memd_kernels.formats import PACKED_PAGE, PackedPages

from memd.engine.packing_errors import PackingErrors
from memd.engine.slots import upload
from memd.pool.defrag import PageMove
from memd.pool.layout import KVLayout
from memd.pool.sequence import PageCopy
from memd.types import PageId


class DeviceMover:
    """Enqueues copies behind all that was launched so far, and before whatever comes next.

    Args:
        kv: All full pages (see `memd.arena.arena.Arena.kv`).
        packed: All packed pages, in the same memory; None: there are none.
        layout: Of both.
        errors: Told what packing loses.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        packed: PackedPages | None,
        layout: KVLayout,
        errors: PackingErrors,
    ) -> None:
        self._kv = kv
        self._packed = packed
        self._layout = layout
        self._errors = errors

    def warm_up(self) -> None:
        """Compile the kernels by copies of nothing, so that no step has to wait for it."""
        with torch.inference_mode():
            places = self._places([-1], [0], [0])
            kernels.move_pages(self._kv, *places)
            kernels.move_pages(self._kv, *places[:2])
            if self._packed is not None:
                kernels.move_packed_pages(self._packed, *places[:2])
                kernels.pack_pages(self._kv, self._packed, *places[:2])

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copy pages to other places; all moves are of one format."""
        if not moves:
            return
        packed = moves[0].packed
        with torch.inference_mode():
            places = self._places(
                [self._number(move.source, packed) for move in moves],
                [self._number(move.target, packed) for move in moves],
            )
            if packed:
                kernels.move_packed_pages(self._packed_pages, *places)
            else:
                kernels.move_pages(self._kv, *places)

    def pack(self, moves: Sequence[PageMove]) -> None:
        """Write full pages as packed ones at their targets."""
        with torch.inference_mode():
            places = self._places(
                [self._number(move.source, False) for move in moves],
                [self._number(move.target, True) for move in moves],
            )
            self._errors.add(kernels.pack_pages(self._kv, self._packed_pages, *places))

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first tokens of full pages into other full pages."""
        places = self._places(
            [self._number(copy.source, False) for copy in copies],
            [self._number(copy.target, False) for copy in copies],
            [copy.num_tokens for copy in copies],
        )
        kernels.move_pages(self._kv, *places)

    @property
    def _packed_pages(self) -> PackedPages:
        assert self._packed is not None
        return self._packed

    def _number(self, page: PageId, packed: bool) -> int:
        """What kernels call a page, among those of its format."""
        return self._layout.table_entry(page, packed) & ~PACKED_PAGE

    def _places(self, *rows: list[int]) -> torch.Tensor:
        """Rows of numbers on the device, int32."""
        (places,) = upload(self._kv.device, np.array(rows, np.int32))
        return places
