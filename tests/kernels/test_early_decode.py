"""Decode attention of one sequence that begins while the kernel before it ends."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from memd_kernels import launch
from memd_kernels.launch import LaunchConfig
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.decode_launch import OVERLAPPED, launch_room
from memd_kernels.triton.overlap import overlapped, wait_for_previous
from memd_kernels.triton.plan import plan_decode
from memd_kernels.triton.rope import rope_and_store
from torch import Tensor

from .conftest import MakeKV
from .test_attention import LAYER, SCALE, int32
from .test_triton_decode import check, make_case


@triton.jit
def late_copy_kernel(source, target, counter, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    """Copy SIZE elements long after the next kernel was let in."""
    wait_for_previous(OVERLAP)
    late = 0
    for _ in range(100):
        late = tl.minimum(tl.atomic_add(counter + late, 1), 0)  # 0, which only memory tells
    at = late + tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at))


def behind_late_writes(
    make_kv: MakeKV, device: torch.device, lens: list[int]
) -> tuple[Callable[[], list[Tensor]], Callable[[list[Tensor]], None]]:
    """Eight steps whose queries, last keys and last values are written just before; their check."""
    shape = {"kv_heads": 1, "page_tokens": 64, "head_dim": 128}
    q, kv, table, contents = make_case(make_kv, device, lens, 4, dtype=torch.float16, **shape)
    kv_lens = int32(*lens).to(device)
    plan = plan_decode(kv_lens, kv, 4, None)
    if device.type == "cuda" and launch.capability(device) == (9, 0):
        assert (plan.config.variant == OVERLAPPED) == (len(lens) == 1)
    last = kv_lens - 1
    places = table.gather(1, (last // 64).long()[:, None])[:, 0], last % 64
    angles = torch.ones(len(lens), 64, device=device), torch.zeros(len(lens), 64, device=device)
    queries, keys, values = torch.randn(3, 8, len(lens), 4, 128, dtype=q.dtype, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)

    def steps() -> list[Tensor]:
        outs = []
        for query, key, value in zip(queries, keys[:, :, :1], values[:, :, :1], strict=True):
            rotated = rope_and_store(query, key, value, *angles, kv, LAYER, *places)
            late_copy_kernel[(1,)](rotated, q, counter, q.numel(), **overlapped(device))
            outs.append(decode_attention(q, kv, LAYER, table, kv_lens, SCALE, None, plan))
        return outs

    def check_steps(outs: list[Tensor]) -> None:
        for out, query, *written in zip(outs, queries, keys[:, :, 0], values[:, :, 0], strict=True):
            for content, *token in zip(contents, *written, strict=True):
                content[:, 0, -1] = torch.stack(token)
            check(out, query, contents, None)

    return steps, check_steps


@pytest.mark.parametrize("lens", [[300], [300, 65]])
def test_what_the_kernel_before_writes(
    make_kv: MakeKV, device: torch.device, lens: list[int]
) -> None:
    steps, check_steps = behind_late_writes(make_kv, device, lens)
    check_steps(steps())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lens", [[300], [300, 65], [20_000]])
def test_what_the_kernel_before_writes_in_a_graph(
    make_kv: MakeKV, device: torch.device, lens: list[int]
) -> None:
    steps, check_steps = behind_late_writes(make_kv, device, lens)
    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = steps()
    graph.replay()
    check_steps(outs)
    first = torch.stack(outs)
    for _ in range(200):
        graph.replay()
        assert torch.equal(torch.stack(outs), first)


def test_one_sequence_begins_early_but_not_where_results_may_not_depend_on_the_batch() -> None:
    def variant(rows: int, format: str = "half") -> str:
        return launch.config(
            "decode_attention", (9, 0), head_dim=128, format=format, rows=rows
        ).variant

    assert [variant(rows) for rows in (1, 2, 8, 64)] == [OVERLAPPED, "", "", ""]
    assert {variant(1, format) for format in ("int8", "int4", "fp8")} == {""}
    launch.set_batch_invariant(True)
    try:
        assert {variant(rows) for rows in (1, 2, 64)} == {""}
    finally:
        launch.set_batch_invariant(False)


def test_launches_that_overlap_leave_no_room() -> None:
    """Programs of two overlapped launches would gather on a few multiprocessors."""
    tile = 2 * 64 * 128 * 2
    config = LaunchConfig(4, 4, block_n=64, splits=1)
    room = launch_room(config, tile)
    assert room is not None
    multiprocessor, reserved = 228 << 10, 1 << 10
    assert 2 * (3 * tile + room + 8192 + reserved) > multiprocessor  # and queries of two stages
    assert launch_room(config, tile // 2) is None  # more than a kernel may declare
    assert launch_room(config, 2 * tile) is None
    assert launch_room(replace(config, splits=2), tile) is None
