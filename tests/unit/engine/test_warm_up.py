"""First passes run over blocks as the pool has them: kernels are compiled for these."""

from typing import Any

import pytest
import torch
from memd_kernels.formats import PackedFormat, PackedPages
from packed_toy import CONFIG, PackedToy
from torch import Tensor

from memd.engine.warm_up import warm_up
from memd.evaluate.guard import measure_losses
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout, plan_layout

CPU = torch.device("cpu")
FORM = PackedFormat("int8", 16, CONFIG.head_dim)


class Watched:
    """A model that notes the blocks that it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []
        self._model = PackedToy()

    def forward(self, batch: ForwardBatch, kv: Tensor, packed: PackedPages | None = None) -> Tensor:
        self.seen.append((kv.shape[1], None if packed is None else packed.memory.shape[1]))
        self._model.write(batch, kv)
        assert batch.logits_rows is not None
        return torch.zeros(len(batch.logits_rows), CONFIG.vocab_size)


def layout(block_bytes: int, packed: bool) -> KVLayout:
    sizes: dict[str, Any] = {
        "num_layers": CONFIG.num_layers,
        "num_kv_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
    }
    packed_bytes = FORM.page_bytes(CONFIG.num_layers, CONFIG.num_kv_heads) if packed else None
    return plan_layout(
        **sizes,
        element_bytes=4,
        page_tokens=16,
        granule_bytes=4096,
        target_block_bytes=block_bytes,
        packed_page_bytes=packed_bytes,
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("block_bytes", [4096, 65536])
def test_kernels_are_compiled_for_the_pools_blocks(block_bytes: int, packed: bool) -> None:
    model, pages = Watched(), layout(block_bytes, packed)
    form = FORM if packed else None
    warm_up(model.forward, pages, form, CPU, torch.float32)
    expected = pages.pages_per_block, pages.packed_pages_per_block if packed else None
    assert model.seen == [expected] * 2
    if packed:
        losses = measure_losses(model.forward, CONFIG, FORM, torch.float32, CPU, pages)
        assert model.seen == [expected] * 3
        alone = measure_losses(model.forward, CONFIG, FORM, torch.float32, CPU)
        assert losses == alone, "whatever the blocks"
        assert model.seen[-1] != expected
