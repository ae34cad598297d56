"""Batches over shuffled pages, and how kernels are timed: what `decode.py` works with."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from memd_kernels import launch
from memd_kernels.launch import Entry, LaunchConfig, Table
from memd_kernels.plan import DecodePlan
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.plan import plan_decode
from torch import Tensor

MOST_LAYERS = 48  # many, as in a model: what the start of a replay costs is a small part then
MOST_BYTES = 16 << 30  # of a batch, so that there is room for those of peers
DEVICE = torch.device("cuda")


def say(*words: object) -> None:
    print(*words, flush=True)


@dataclass
class Batch:
    """Sequences of given lengths over shuffled pages."""

    kv: Tensor
    q: Tensor
    table: Tensor
    lens: Tensor
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.q.shape[2] ** -0.5

    @property
    def layers(self) -> int:
        return self.kv.shape[2]

    def plan(self, window: int | None = None, groups: Tensor | None = None) -> DecodePlan:
        return plan_decode(self.lens, self.kv, self.q.shape[1], window, groups)

    def decode(self, layer: int, plan: DecodePlan | None, window: int | None = None) -> Tensor:
        return decode_attention(
            self.q, self.kv, layer, self.table, self.lens, self.scale, window, plan
        )


def make_batch(
    lens: list[int],
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_tokens: int = 64,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    spoil: bool = False,
) -> Batch:
    """Random contents; with `spoil`, NaN in free pages and behind each sequence."""
    counts = [-(-length // page_tokens) for length in lens]
    per_block = 8
    blocks = -(-(sum(counts) + 3) // per_block)
    page = (layers, 2, kv_heads, page_tokens, head_dim)
    numel = per_block * torch.Size(page).numel()
    memory = torch.empty(blocks, numel + 128, dtype=dtype, device=DEVICE).normal_()
    kv = memory[:, :numel].unflatten(1, (per_block, *page))
    pages = torch.randperm(blocks * per_block, device=DEVICE).int()
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32, device=DEVICE)
    used = 0
    for row, count in enumerate(counts):
        table[row, :count] = pages[used : used + count]
        used += count
    if spoil:
        for page_id in pages[used:].tolist():
            kv[page_id // per_block, page_id % per_block] = torch.nan
        for row, length in enumerate(lens):
            if length % page_tokens:
                block, at = divmod(int(table[row, counts[row] - 1]), per_block)
                kv[block, at, :, :, :, length % page_tokens :] = torch.nan
    q = torch.empty(len(lens), heads, head_dim, dtype=dtype, device=DEVICE).normal_()
    return Batch(kv, q, table, torch.tensor(lens, dtype=torch.int32, device=DEVICE))


def share(batch: Batch, groups: list[list[int]]) -> Tensor:
    """Rows of each group begin with the pages of its first row; the groups on the device."""
    for first, rows, pages in groups:
        batch.table[first : first + rows, :pages] = batch.table[first, :pages]
    return torch.tensor(groups, dtype=torch.int32, device=DEVICE)


def layers_for(tokens: int, token_bytes: int) -> int:
    return max(2, min(MOST_LAYERS, MOST_BYTES // (tokens * token_bytes)))


def capture(run: Callable[[int], object], layers: int) -> torch.cuda.CUDAGraph:
    """A graph of one run for each layer."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    return graph


def measure(run: Callable[[int], object], layers: int, replays: int = 20) -> tuple[float, float]:
    """Microseconds of a layer: median, and half of the middle eighty percent."""
    graph = capture(run, layers)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(replays)
    ]
    graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 / layers for begin, end in events)
    tenth = replays // 10
    return statistics.median(times), (times[-1 - tenth] - times[tenth]) / 2


def use(kernel: str, config: LaunchConfig | None) -> None:
    """Launch a kernel with this; None: as the tables say."""
    if config is None:
        launch.unload_user_table()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        path.write_text(launch.format_table(Table((Entry(kernel, config),), None)))
        launch.load_user_table(path)


class Run:
    """Counts what went wrong, and knows when to end."""

    def __init__(self, seconds: float) -> None:
        self.failed = 0
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def case(self, name: str, body: Callable[[], str]) -> None:
        try:
            say(name, body())
        except Exception as error:
            self.failed += 1
            say(name, "FAILED", type(error).__name__, str(error).strip().splitlines()[:1])
            torch.cuda.synchronize()
