"""The batch-invariant pass: what a token gets does not depend on what is computed with it."""

from dataclasses import replace
from itertools import pairwise

import memd_kernels as kernels
import torch
from memd_kernels.formats import PackedPages

from memd.engine.runner import Forward
from memd.models.decoder import ForwardBatch


def batch_invariant(forward: Forward, on: bool, device: torch.device) -> Forward:
    """A model's pass, batch-invariant if that is on.

    A GPU takes kernels that add up in one order (`memd_kernels.triton.invariant`), from here on, in
    this process. On a CPU, whose libraries choose an order for each number of rows, every token is
    a pass of its own, and so computed as it is alone.
    """
    kernels.set_batch_invariant(on)
    if not on or device.type != "cpu":
        return forward

    def one_by_one(
        batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        return _token_by_token(forward, batch, kv, packed)

    return one_by_one


def _token_by_token(
    forward: Forward, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None
) -> torch.Tensor:
    """Rows in order, so that a prompt's tokens find those before them in the pages."""
    count = len(batch.token_ids)
    wanted = [*range(count)] if batch.logits_rows is None else batch.logits_rows.tolist()
    headed = set(wanted)
    logits: dict[int, torch.Tensor] = {}
    none = torch.zeros(0, dtype=torch.int64)
    for row, (sequence, length) in enumerate(_places(batch)):
        one = slice(row, row + 1)
        shares = None
        if batch.shares is not None and sequence < batch.num_decodes:
            shares = batch.shares[sequence : sequence + 1]
        single = replace(
            batch,
            token_ids=batch.token_ids[one],
            positions=batch.positions[one],
            write_pages=batch.write_pages[one],
            write_offsets=batch.write_offsets[one],
            page_table=batch.page_table[sequence : sequence + 1],
            num_decodes=1,
            query_starts=batch.query_starts[:1],
            kv_lens=batch.kv_lens.new_tensor([length]),
            logits_rows=None if row in headed else none,
            groups=None,
            shares=shares,
        )
        logits[row] = forward(single, kv, packed)
    return torch.cat([logits[row] for row in wanted]) if wanted else logits[count - 1]


def _places(batch: ForwardBatch) -> list[tuple[int, int]]:
    """For each row the row of its sequence in the page table, and its length with the token."""
    lens, starts = batch.kv_lens.tolist(), batch.query_starts.tolist()
    places = [(sequence, lens[sequence]) for sequence in range(batch.num_decodes)]
    for sequence, (start, stop) in enumerate(pairwise(starts), batch.num_decodes):
        last = lens[sequence]
        places += [(sequence, last - stop + row + 1) for row in range(start, stop)]
    return places
