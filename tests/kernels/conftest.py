"""A small KV memory with everything that can go wrong in it; kernels interpreted without a GPU.

Triton decides when it is imported whether it compiles or interprets, so that is settled here, which
pytest imports before the tests beside it. Nothing else in the tests imports triton.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from memd_kernels import launch
from memd_kernels.launch import Entry, LaunchConfig, Table
from torch import Tensor

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "triton was imported before it was told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"

MakeKV = Callable[..., Tensor]
UseLaunches = Callable[..., None]


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """actual = x @ weight.T + bias, within what sums in float32 and its dtype's rounding allow."""
    product, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    step = torch.finfo(actual.dtype).eps if actual.dtype == torch.bfloat16 else 0.0
    allowed = 1e-6 * terms + step * product.abs()
    if bias is not None:
        product = product + bias.double()
        allowed = allowed + step * product.abs() + 1e-6 * bias.double().abs()
    assert ((actual.double() - product).abs() <= allowed).all()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: a GPU where there is one, else interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More divide a row's keys by what else is in the batch; another test may have set more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def use_launches(tmp_path: Path) -> Iterator[UseLaunches]:
    """Launches by kernel, used instead of those of the tables until the test ends."""

    def use(**configs: LaunchConfig) -> None:
        path = tmp_path / "table.json"
        entries = tuple(Entry(kernel, config) for kernel, config in configs.items())
        path.write_text(launch.format_table(Table(entries, None)))
        launch.load_user_table(path)

    yield use
    launch.unload_user_table()


@pytest.fixture
def make_kv() -> MakeKV:
    """Builds kv of NaN: [num_blocks, pages_per_block, layers, 2, kv_heads, page_tokens, head_dim].

    `waste` elements are left over at the end of each block; the storage starts off the tensor.
    """

    def make(
        num_blocks: int = 5,
        pages_per_block: int = 3,
        num_layers: int = 2,
        num_kv_heads: int = 2,
        page_tokens: int = 4,
        head_dim: int = 8,
        waste: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        page = (num_layers, 2, num_kv_heads, page_tokens, head_dim)
        numel = pages_per_block * torch.Size(page).numel()
        memory = torch.full(
            (num_blocks * (numel + waste) + 5,), torch.nan, dtype=dtype, device=device
        )
        blocks = memory[5:].view(num_blocks, numel + waste)
        return blocks[:, :numel].unflatten(1, (pages_per_block, *page))

    return make
