"""Attention kernels of memd and of others on one GPU, in turns.

    PYTHONPATH=.:kernels python benchmarks/kernels/beside.py [--parts decode shared append]

Takes part what can be imported: FlashInfer (tensor cores, XQA, cascade, prefill) and the
FlashAttention-3 of vLLM's package. Each runs from a CUDA graph over several layers, so that what it
reads has left the second cache; replays take turns. Microseconds a launch, median over rounds, and
the median of the rounds' ratios of the best other to memd. KV in bfloat16, 32 query and 8 KV heads
of 128, shuffled pages.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from decode import ANCHORS, READ_LIMIT
from decode_batch import DEVICE, Batch, capture, layers_for, make_batch, say, share
from memd_kernels.triton.prefill import prefill_attention
from memd_kernels.triton.shared_prefix import shared_prefix_attention
from torch import Tensor

HEADS, KV_HEADS, DIM = 32, 8, 128
ROUNDS = 15
Launch = Callable[[int], object]
BF16 = torch.bfloat16


class Pages:
    """The same amount of keys and values as others lay them out: `[pages, 2, page, heads, dim]`."""

    def __init__(self, rows: int, context: int, page: int, layers: int) -> None:
        count = rows * context // page
        shape = (layers, count, 2, page, KV_HEADS, DIM)
        self.kv = torch.empty(shape, dtype=BF16, device=DEVICE).normal_()
        self.table = torch.randperm(count, device=DEVICE).int().view(rows, -1)
        self.rows, self.context, self.page = rows, context, page

    def starts(self) -> Tensor:
        """First entry of each row in the flat table."""
        return torch.arange(self.rows + 1, dtype=torch.int32) * (self.context // self.page)

    def full(self) -> Tensor:
        """Tokens in each row's last page."""
        return torch.full((self.rows,), self.page, dtype=torch.int32)


def tensor_cores(q: Tensor, pages: Pages) -> Launch:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    work = torch.zeros(512 * 2**20, dtype=torch.uint8, device=DEVICE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=True, backend="fa2")
    wrapper.plan(
        *(pages.starts(), pages.table.view(-1), pages.full(), HEADS, KV_HEADS, DIM, pages.page),
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    return lambda layer: wrapper.run(q, pages.kv[layer])


def xqa(q: Tensor, pages: Pages) -> Launch:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    work = torch.zeros(512 * 2**20, dtype=torch.uint8, device=DEVICE)
    lens = torch.full((pages.rows,), pages.context, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q)
    return lambda layer: trtllm_batch_decode_with_kv_cache(
        *(q, pages.kv[layer], work, pages.table, lens, pages.context),
        bmm1_scale=DIM**-0.5,
        bmm2_scale=1.0,
        out=out,
        kv_layout="NHD",
        backend="xqa",
    )


def flash_attention_3(q: Tensor, pages: Pages, new: int = 1) -> Launch:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    lens = torch.full((pages.rows,), pages.context, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(pages.rows + 1, dtype=torch.int32, device=DEVICE) * new
    ahead = None
    if new == 1:
        ahead = get_scheduler_metadata(
            batch_size=pages.rows,
            max_seqlen_q=1,
            max_seqlen_k=pages.context,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=DIM,
            cache_seqlens=lens,
            qkv_dtype=BF16,
            cu_seqlens_q=starts,
            page_size=pages.page,
            causal=True,
        )
    out = torch.empty_like(q)
    return lambda layer: flash_attn_varlen_func(
        *(q, pages.kv[layer][:, 0], pages.kv[layer][:, 1]),
        max_seqlen_q=new,
        cu_seqlens_q=starts,
        max_seqlen_k=pages.context,
        seqused_k=lens,
        block_table=pages.table,
        causal=True,
        out=out,
        fa_version=3,
        scheduler_metadata=ahead,
    )


def cascade(q: Tensor, pages: Pages, shared_pages: int) -> Launch:
    import flashinfer

    work = torch.zeros(512 * 2**20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, work, "NHD")
    rows, own = pages.rows, pages.table[:, shared_pages:].contiguous()
    ends = torch.tensor([0, rows], dtype=torch.int32)
    each = torch.arange(rows + 1, dtype=torch.int32)
    wrapper.plan(
        [ends, each],
        [torch.tensor([0, shared_pages], dtype=torch.int32), each * own.shape[1]],
        [pages.table[0, :shared_pages].contiguous(), own.view(-1)],
        [torch.tensor([pages.page], dtype=torch.int32), pages.full()],
        *(HEADS, KV_HEADS, DIM, pages.page),
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    return lambda layer: wrapper.run(q, pages.kv[layer])


def append(backend: str, q: Tensor, pages: Pages, new: int) -> Launch:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    work = torch.zeros(512 * 2**20, dtype=torch.uint8, device=DEVICE)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(work, "NHD", backend=backend)
    wrapper.plan(
        torch.arange(pages.rows + 1, dtype=torch.int32) * new,
        *(pages.starts(), pages.table.view(-1), pages.full(), HEADS, KV_HEADS, DIM, pages.page),
        causal=True,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    return lambda layer: wrapper.run(q, pages.kv[layer])


def in_turns(name: str, ours: Launch, others: dict[str, Callable[[], Launch]], layers: int) -> str:
    """Time all, and tell memd's time, each other's, and the ratio of the best other to memd."""
    launches = {"memd": ours}  # kept: what a launch works with must live as long as its graph
    graphs = {"memd": capture(ours, layers)}
    for other, make in others.items():
        try:
            launches[other] = make()
            graphs[other] = capture(launches[other], layers)
        except Exception as error:
            say("  left out:", other, type(error).__name__, str(error)[:120].replace("\n", " "))
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {key: [] for key in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(-1, ROUNDS):
        for key, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[key].append(begin.elapsed_time(end) * 1e3 / layers)
    medians = {key: statistics.median(each) for key, each in times.items()}
    rest = {key: each for key, each in medians.items() if key != "memd"}
    told = f"{name}: " + ", ".join(
        f"{key} {median:.1f} ({min(times[key]):.1f}-{max(times[key]):.1f})"
        for key, median in medians.items()
    )
    if not rest:
        return told
    best = min(rest, key=rest.__getitem__)
    ratios = [b / a for a, b in zip(times["memd"], times[best], strict=True)]
    return f"{told}; best {best}, ratio {statistics.median(ratios):.3f}"


def decode_rows() -> None:
    for rows, context in ANCHORS:
        layers = layers_for(rows * context, 4 * KV_HEADS * DIM)
        batch = make_batch([context] * rows, layers=layers)
        pages = {page: Pages(rows, context, page, layers) for page in (64, 128)}
        others: dict[str, Callable[[], Launch]] = {}
        for page, each in pages.items():
            others[f"FlashInfer {page}"] = partial(tensor_cores, batch.q, each)
            others[f"XQA {page}"] = partial(xqa, batch.q, each)
            others[f"FA3 {page}"] = partial(flash_attention_3, batch.q, each)
        plan = batch.plan()
        say(in_turns(f"{rows}x{context}", partial(batch.decode, plan=plan), others, layers))
        floor = rows * context * 4 * KV_HEADS * DIM / READ_LIMIT / 1e3
        say(f"  read limit {floor:.1f}")
        del batch, pages, others, plan
        torch.cuda.empty_cache()


def shared_rows() -> None:
    rows, shared, own, layers = 64, 8192, 256, 4
    batch = make_batch([shared + own] * rows, layers=layers)
    groups = share(batch, [[0, rows, shared // 64]])
    pages = Pages(rows, shared + own, 64, layers)
    pages.table[:, : shared // 64] = pages.table[0, : shared // 64].clone()
    plan, plain = batch.plan(None, groups), batch.plan()
    tail = (batch.table, batch.lens, groups, batch.scale, None, plan)

    def ours(layer: int) -> Tensor:
        return shared_prefix_attention(batch.q, batch.kv, layer, *tail)

    others: dict[str, Callable[[], Launch]] = {
        "cascade": partial(cascade, batch.q, pages, shared // 64),
        "memd, plain decode": lambda: partial(batch.decode, plan=plain),
    }
    say(in_turns(f"{rows} x ({shared} shared + {own})", ours, others, layers))


def append_rows() -> None:
    for rows, new, cached in ((1, 512, 8192), (4, 512, 8192), (8, 2048, 8192), (8, 2048, 0)):
        length = cached + new
        batch: Batch = make_batch([length] * rows, layers=2)
        pages = Pages(rows, length, 64, 2)
        q = torch.empty(rows * new, HEADS, DIM, dtype=BF16, device=DEVICE).normal_()
        starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * new
        tail = (batch.table, starts, batch.lens, batch.scale, None)

        def ours(layer: int, q: Tensor = q, batch: Batch = batch, tail: tuple = tail) -> Tensor:
            return prefill_attention(q, batch.kv, layer, *tail)

        others: dict[str, Callable[[], Launch]] = {
            "FlashInfer fa3": partial(append, "fa3", q, pages, new),
            "FA3": partial(flash_attention_3, q, pages, new),
        }
        say(in_turns(f"{rows} x {new} new of {length}", ours, others, 2))
        operations = 4 * rows * HEADS * DIM * (new * cached + new * new / 2)
        say(f"  {operations / 1e6:.0f} MFLOP: TFLOP/s are that over microseconds")
        del batch, pages, others
        torch.cuda.empty_cache()


def main() -> None:
    """Parse the command line and run its parts."""
    parts = {"decode": decode_rows, "shared": shared_rows, "append": append_rows}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=parts, default=list(parts))
    torch.manual_seed(0)
    for part in parser.parse_args().parts:
        parts[part]()


if __name__ == "__main__":
    main()
