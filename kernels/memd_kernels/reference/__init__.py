"""Every kernel in plain torch, on CPU and CUDA.

The KV memory is one tensor `kv` of shape [num_blocks, pages_per_block, num_layers, 2, num_kv_heads,
page_tokens, head_dim] whose axis 3 is keys, values. Its first stride may exceed `pages_per_block`
pages: what is left over at the end of a block is never touched. Page id `p` is
`kv[p // pages_per_block, p % pages_per_block]`. Blocks may hold packed pages instead, which a
second view of the same memory shows: `memd_kernels.formats`.
"""

from memd_kernels.reference.attention import (
    decode_attention,
    prefill_attention,
    shared_prefix_attention,
)
from memd_kernels.reference.linear import few_row_linear
from memd_kernels.reference.norm import rms_norm, silu_mul
from memd_kernels.reference.packed import move_packed_pages, pack_pages, unpack_pages
from memd_kernels.reference.pages import move_pages
from memd_kernels.reference.plan import plan_decode
from memd_kernels.reference.rope import rope_and_store, rotate_queries
from memd_kernels.reference.sample import argmax, sample, token_logprobs, uniform

__all__ = [
    "argmax",
    "decode_attention",
    "few_row_linear",
    "move_packed_pages",
    "move_pages",
    "pack_pages",
    "plan_decode",
    "prefill_attention",
    "rms_norm",
    "rope_and_store",
    "rotate_queries",
    "sample",
    "shared_prefix_attention",
    "silu_mul",
    "token_logprobs",
    "uniform",
    "unpack_pages",
]
