"""The forward pass of a Llama-type decoder over paged KV memory: one class for every family.

Called by the engine's runner, under `torch.inference_mode`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import memd_kernels as kernels
import torch
from memd_kernels.formats import PackedPages
from memd_kernels.plan import AttentionPlan
from torch import Tensor

from memd.models.config import ModelConfig, Span
from memd.models.rope import Rotary
from memd.models.spans import narrowed


@dataclass(frozen=True)
class ForwardBatch:
    """One step's tokens: first one token for each decoding sequence, then the prefill chunks.

    T tokens of S sequences; all tensors are on the device.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    write_pages: Tensor  # [T] int64, page of each token's keys and values
    write_offsets: Tensor  # [T] int64, token within that page
    page_table: Tensor  # [S, max_pages] int32, decoding sequences first; unused entries 0. Pages
    # that a window has passed are left out: what follows them moves up.
    num_decodes: int  # as many rows and sequences; those of length 0 at their end are padding
    query_starts: Tensor  # [S - num_decodes + 1] int32, first rows of the chunks, the first at most
    # num_decodes: rows of padding among the decoding ones may be a chunk's
    kv_lens: Tensor  # [S] int32, tokens in the pages of the table, with this step's
    logits_rows: Tensor | None  # [R] int64, rows of T whose logits are wanted; None: all
    groups: Tensor | None = None  # decoding rows that share pages: see shared_prefix_attention;
    # not together with chunks
    shares: Tensor | None = None  # [num_decodes, max_pages] float32, of the pages in attention, as
    # decode_attention adds to it for each layer; not together with groups
    packed_chunks: bool = True  # whether a chunk's sequence may have packed pages


@dataclass(frozen=True)
class _Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    narrow: kernels.NarrowWeight | None  # the same weight, for a few rows on a CPU

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None = None) -> "_Linear":
        return _Linear(weight, bias, kernels.narrow_weight(weight))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if self.narrow is not None and len(x) <= kernels.NARROW_ROWS:
            return kernels.narrow_linear(x, self.narrow, self.bias)
        return kernels.few_row_linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Step:
    """What the layers of one forward pass share.

    Attributes:
        angles: Cosines and sines of the tokens' positions.
        sink_angles: Those of their positions within what is seen, for each span with sinks.
        plans: How decode attention is divided, for each span.
    """

    batch: ForwardBatch
    kv: Tensor
    packed: PackedPages | None
    angles: tuple[Tensor, Tensor]
    sink_angles: dict[Span, tuple[Tensor, Tensor]]
    plans: dict[Span, AttentionPlan]


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: _Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear


class Decoder:
    """Embedding, decoder layers and output head of a model.

    Args:
        config: What the model is.
        tensors: Parameters by Hugging Face name without `model.`, all of one dtype, in which all is
            computed. Emptied: the parts of fused weights are freed as they are joined.
        device: Where the parameters go.
        on_layer: Called when a layer has been computed, so that a long pass is seen to go on.
        on_queries: Called with a layer's number and its rotated queries, [T, num_heads, head_dim],
            once the keys are in the pages; for analysis.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        device: torch.device,
        on_layer: Callable[[], None] = lambda: None,
        on_queries: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self._config = config
        self._on_layer = on_layer
        self._on_queries = on_queries
        self._scale = config.head_dim**-0.5
        self._spans = [config.span(layer) for layer in range(config.num_layers)]
        self._rotary = Rotary(config, device)
        self._embedding = tensors.pop("embed_tokens.weight").to(device)
        self._layers = [_take_layer(tensors, i, device) for i in range(config.num_layers)]
        self._norm = tensors.pop("norm.weight").to(device)
        head = (
            self._embedding if config.tie_embeddings else tensors.pop("lm_head.weight").to(device)
        )
        self._head = _Linear.of(head)

    def with_window(self, window: int, sinks: int) -> "Decoder":
        """This decoder, weights shared, in which no layer sees more than window and sinks."""
        other = copy.copy(self)
        other._config = narrowed(self._config, window, sinks)
        other._spans = [other._config.span(layer) for layer in range(self._config.num_layers)]
        return other

    def forward(self, batch: ForwardBatch, kv: Tensor, packed: PackedPages | None = None) -> Tensor:
        """Run one step: write the tokens' keys and values into the pages and compute logits.

        Shapes:
            kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim],
                the dtype of the parameters, changed in place.
            packed: Packed pages that the batch's page tables name.

        Returns:
            [R, vocab_size], the dtype of the parameters, one row for each of `batch.logits_rows`.

        Raises:
            ValueError: the batch or `kv` does not fit the model.
        """
        step = self._begin(batch, kv, packed)
        eps = self._config.rms_norm_eps
        hidden, residual = self._embedding[batch.token_ids], None
        for index, layer in enumerate(self._layers):
            normed, residual = kernels.rms_norm(hidden, layer.input_norm, eps, residual)
            hidden = self._attend(index, layer, normed, step)
            # After the last layer the other rows have written what they had to.
            if batch.logits_rows is not None and index == len(self._layers) - 1:
                hidden, residual = hidden[batch.logits_rows], residual[batch.logits_rows]
            hidden = layer.output(hidden)
            normed, residual = kernels.rms_norm(hidden, layer.mlp_norm, eps, residual)
            hidden = layer.down(kernels.silu_mul(layer.gate_up(normed)))
            self._on_layer()
        normed, _ = kernels.rms_norm(hidden, self._norm, eps, residual)
        return self._head(normed).contiguous()

    def _begin(self, batch: ForwardBatch, kv: Tensor, packed: PackedPages | None) -> _Step:
        heads, decodes = self._config.num_heads, batch.num_decodes
        lens, table = batch.kv_lens[:decodes], batch.page_table[:decodes]
        sink_angles: dict[Span, tuple[Tensor, Tensor]] = {}
        plans: dict[Span, AttentionPlan] = {}
        for span in set(self._spans):
            if decodes:
                wanted = batch.shares is not None
                plans[span] = kernels.plan_decode(
                    lens, kv, heads, span.window, batch.groups, span.sinks, table, packed, wanted
                )
            if span.sinks and span.window is not None:
                farthest = span.sinks + span.window - 1
                sink_angles[span] = self._rotary.angles(batch.positions.clamp(max=farthest))
        return _Step(batch, kv, packed, self._rotary.angles(batch.positions), sink_angles, plans)

    def _attend(self, index: int, layer: _Layer, normed: Tensor, step: _Step) -> Tensor:
        """Attention of one layer before its output projection, [T, num_heads * head_dim]."""
        config, batch, kv, span = self._config, step.batch, step.kv, self._spans[index]
        qkv = layer.qkv(normed).unflatten(1, (-1, config.head_dim))
        q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        sink_q = None
        if span in step.sink_angles:
            angles = step.sink_angles[span]
            sink_q = kernels.rotate_queries(q, *angles, layer.q_norm, config.rms_norm_eps)
        q = kernels.rope_and_store(
            q,
            k,
            v,
            *step.angles,
            kv,
            index,
            batch.write_pages,
            batch.write_offsets,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
        )
        if self._on_queries is not None:
            self._on_queries(index, q)
        decodes, scale, window = batch.num_decodes, self._scale, span.window
        table, lens = batch.page_table[:decodes], batch.kv_lens[:decodes]
        sinks = None if sink_q is None else kernels.Sinks(span.sinks, sink_q[:decodes])
        if batch.groups is not None:
            groups, plan = batch.groups, step.plans[span]
            return kernels.shared_prefix_attention(
                q, kv, index, table, lens, groups, scale, window, plan, sinks, step.packed
            ).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            kernels.decode_attention(
                q[:decodes],
                kv,
                index,
                table,
                lens,
                scale,
                window,
                step.plans[span],
                sinks,
                step.packed,
                batch.shares,
                out[:decodes],
            )
        if decodes < len(batch.kv_lens):  # after the decoding rows, whose padding has written zeros
            kernels.prefill_attention(
                q,
                kv,
                index,
                batch.page_table[decodes:],
                batch.query_starts,
                batch.kv_lens[decodes:],
                scale,
                window,
                None if sink_q is None else kernels.Sinks(span.sinks, sink_q),
                step.packed if batch.packed_chunks else None,  # without, faster kernels do
                out,
            )
        return out.flatten(1)


def _take_layer(tensors: dict[str, Tensor], index: int, device: torch.device) -> _Layer:
    def take(name: str) -> Tensor:
        return tensors.pop(f"layers.{index}.{name}").to(device)

    def take_optional(name: str) -> Tensor | None:
        return take(name) if f"layers.{index}.{name}" in tensors else None

    def join(*names: str) -> _Linear:
        weights = [take(f"{name}.weight") for name in names]
        biases = [bias for name in names if (bias := take_optional(f"{name}.bias")) is not None]
        return _Linear.of(
            torch.cat(weights) if len(weights) > 1 else weights[0],
            torch.cat(biases) if biases else None,
        )

    return _Layer(
        input_norm=take("input_layernorm.weight"),
        qkv=join("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=take_optional("self_attn.q_norm.weight"),
        k_norm=take_optional("self_attn.k_norm.weight"),
        output=join("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=join("mlp.gate_proj", "mlp.up_proj"),
        down=join("mlp.down_proj"),
    )
