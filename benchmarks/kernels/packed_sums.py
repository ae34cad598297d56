"""What matrix units that cut off lose of the values of packed pages, in an emulation.

    PYTHONPATH=.:kernels python benchmarks/kernels/packed_sums.py [--kept-bits 2] [--tokens 32768]

The kernel reads a code as 1024 more than it is and takes that away at the end. A matrix unit lines
up 16 products and the sum before them by the largest, cuts off what lies below the last bit of a
float32 and `--kept-bits` more, and rounds its result towards zero: the larger the sum, the more is
lost. Sums over all tokens of a program are compared with sums over units of 64 tokens, both
against the exact result over the same packed pages. Random data; needs no GPU.
"""

import argparse

import torch
from memd_kernels.formats import UNIT_TOKENS, FormatName, PackedFormat
from memd_kernels.reference.packed import read_heads, write_heads
from torch import Tensor

PRODUCTS = 16  # that a unit adds at once
HEAD_DIM = 128
QUERIES = 4
ITEMS = (17, 33, 132)  # of one sequence, with 1, 2 and 8 programs a multiprocessor of an H200


def cut(x: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """Towards zero, to so many bits below the leading one of 2**exponent."""
    step = torch.exp2(exponent - bits)
    return torch.trunc(x / step) * step


def exponent_of(x: Tensor) -> Tensor:
    return x.abs().clamp(min=1e-300).log2().floor()


def multiply(codes: Tensor, weights: Tensor, total: Tensor, kept_bits: int) -> Tensor:
    """[N, D] codes and [N, Q] weights added to [Q, D], as a matrix unit does."""
    for first in range(0, len(codes), PRODUCTS):
        part = slice(first, first + PRODUCTS)
        products = codes[part, None, :] * weights[part, :, None]
        terms = torch.cat((products, total[None]))
        most = exponent_of(terms.abs().amax(0))
        found = cut(terms, most, 23 + kept_bits).sum(0)
        total = cut(found, exponent_of(found), 23)
    return total


def attend(
    scores: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, name: FormatName, bits: int,
    items: int, apart: bool,
) -> Tensor:  # fmt: skip
    """[Q, D], with as many programs as `items`; `apart`: units are summed up apart."""
    units = len(scores) // UNIT_TOKENS
    size = -(-units // items) * UNIT_TOKENS
    means, logs = [], []
    for start in range(0, len(scores), size):
        item = slice(start, start + size)
        largest = scores[item].amax(0)
        weights = torch.exp(scores[item] - largest).float().double()
        steps = torch.ones(UNIT_TOKENS, dtype=torch.float64)
        if name == "int4":
            steps[UNIT_TOKENS // 2 :] = 16.0  # upper halves of bytes
        steps = steps.repeat(len(weights) // UNIT_TOKENS)[:, None]
        scaled = (weights * scales[item] / steps).half().double()
        raised = 1024.0 + codes[item] * steps
        total = torch.zeros(QUERIES, HEAD_DIM, dtype=torch.float64)
        for first in range(0, len(weights), UNIT_TOKENS):
            unit = slice(first, first + UNIT_TOKENS)
            before = torch.zeros_like(total) if apart else total
            found = multiply(raised[unit], scaled[unit], before, bits)
            total = (total + found).float().double() if apart else found
        rest = (weights * offsets[item] - 1024.0 * scaled).sum(0)[:, None]
        means.append((total + rest) / weights.sum(0)[:, None])
        logs.append(largest + weights.sum(0).log())
    share = torch.softmax(torch.stack(logs), 0)
    return (torch.stack(means) * share[:, :, None]).sum(0)


def parts_of(values: Tensor, name: FormatName) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, D], scales and offsets [N, 1] of values [N, D], as pages have them."""
    format = PackedFormat(name, UNIT_TOKENS, HEAD_DIM)
    pages = values.float().unflatten(0, (-1, UNIT_TOKENS))
    heads = torch.zeros(len(pages), 1, format.head_bytes, dtype=torch.uint8)
    write_heads(format, torch.stack((pages, pages), 1)[:, :, None], heads)
    _, read = read_heads(format, heads)
    read = read.flatten(0, 2).double()
    parts = format.parts
    offsets = heads[..., parts.value_offsets :][..., : 2 * UNIT_TOKENS].contiguous()
    scales = heads[..., parts.value_scales :][..., :UNIT_TOKENS].to(torch.int16) << 7
    scale = scales.contiguous().view(torch.float16).flatten()[:, None].double()
    offset = offsets.view(torch.float16).flatten()[:, None].double() + scale * format.code_base
    return ((read - offset) / scale).round(), scale, offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept-bits", type=int, default=2, help="more than a float32 has")
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    torch.manual_seed(0)
    keys, values = torch.randn(2, options.tokens, HEAD_DIM, dtype=torch.float64)
    query = torch.randn(QUERIES, HEAD_DIM, dtype=torch.float64)
    scores = keys @ query.T * HEAD_DIM**-0.5
    for name in ("int4", "int8"):
        codes, scale, offset = parts_of(values, name)
        exact = torch.softmax(scores, 0).T @ (offset + scale * codes)
        outs: list[Tensor] = []
        for items in ITEMS:
            whole, apart = (
                attend(scores, codes, scale, offset, name, options.kept_bits, items, each)
                for each in (False, True)
            )
            errors = [float((out - exact).norm() / exact.norm()) for out in (whole, apart)]
            print(f"{name}, {items} programs: error {errors[0]:.4f}, apart {errors[1]:.4f}")
            outs.append(whole)
        for first, second in ((0, 1), (1, 2)):
            change = float((outs[first] - outs[second]).norm() / exact.norm())
            print(f"{name}, {ITEMS[first]} against {ITEMS[second]} programs: {change:.4f}")


if __name__ == "__main__":
    main()
