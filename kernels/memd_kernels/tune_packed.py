"""Cases of the tuner for decode attention over packed pages; see `memd_kernels.tune`."""

from collections.abc import Iterable, Iterator
from itertools import product

import torch

from memd_kernels.formats import PACKED_PAGE, FormatName, PackedFormat, view_packed
from memd_kernels.launch import Entry, LaunchConfig
from memd_kernels.tune import ROTATED_BYTES, TuneCase

# Rows and length of each; of 32 query and 8 KV heads, as in Llama-3.1-8B.
BATCHES = ((1, 32768), (8, 8192), (64, 8192), (128, 2048))
CANDIDATES = tuple(
    LaunchConfig(warps, stages, block_n=64, splits=splits)
    for warps, stages, splits in product((1, 2), (2, 3), (2, 3, 4, 5, 6, 8, 10, 12, 16, 20))
)


def packed_cases(
    device: torch.device,
    names: Iterable[FormatName] = ("int8", "int4"),
    batches: Iterable[tuple[int, int]] = BATCHES,
    head_dims: Iterable[int] = (64, 128),
    candidates: tuple[LaunchConfig, ...] = CANDIDATES,
    rotated_bytes: int = ROTATED_BYTES,
) -> Iterator[TuneCase]:
    """`decode_attention` of sequences whose pages of 64 tokens are packed but for the last.

    Args:
        device: Where the kernel runs.
        names: Page formats.
        batches: Rows, and tokens of each.
        head_dims: Head dimensions.
        candidates: Launches to try.
        rotated_bytes: Least size of what is read before a layer is read again.
    """
    from memd_kernels.triton.decode import check_decode, launch_decode, scratch
    from memd_kernels.triton.plan import divide

    for name, dim, (rows, tokens) in product(names, head_dims, batches):
        format = PackedFormat(name, 64, dim)
        pages = tokens // 64
        layer_bytes = rows * pages * 8 * format.head_bytes
        layers = max(2, rotated_bytes // layer_bytes + 1)
        page_bytes = format.page_bytes(layers, 8)
        # Zeros are numbers of every format, and take as long as others.
        arena = torch.zeros(rows * pages * page_bytes, dtype=torch.uint8, device=device)
        packed = view_packed(arena, format, page_bytes, layers, 8)
        kv = torch.zeros(1, rows, layers, 2, 8, 64, dim, dtype=torch.float16, device=device)
        order = torch.randperm(rows * pages, device=device).int().view(rows, pages)
        table = order + PACKED_PAGE
        table[:, -1] = torch.arange(rows, device=device)
        lens = torch.full((rows,), tokens, dtype=torch.int32, device=device)
        q = torch.randn(rows, 32, dim, device=device).half()

        def run(found: LaunchConfig) -> None:
            check_decode(q, kv, 0, table, lens, packed)  # noqa: B023
            plan = divide(found, lens, kv, None, None, None, 0, table, packed)  # noqa: B023
            parts, logs = scratch(q, len(plan.items))  # noqa: B023
            for layer in range(kv.shape[2]):  # noqa: B023
                launch_decode(
                    *(q, kv, layer, table, 1.0, plan, parts, logs),  # noqa: B023
                    packed=packed,  # noqa: B023
                )

        shape = (("rows", rows),)
        entry = Entry("decode_attention", LaunchConfig(), name, dim, shape)
        yield TuneCase(entry, candidates, run, layers)
