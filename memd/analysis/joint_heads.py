"""How heads of a cluster are joined to one, from the keys and values that a text gave them."""

import torch
from torch import Tensor

from memd.models.head_plan import LayerClusters, joined

# Where the text tells nothing heads are averaged, as if it held this share of their energy there.
_PRIOR = 1e-6


def joint_heads(
    keys: Tensor, values: Tensor, clusters: LayerClusters, pairs: int
) -> tuple[bytes, bytes]:
    """Bases of values and factors of keys of one layer, as `HeadPlan` holds them.

    Shapes:
        keys, values: [heads, T, head_dim]; keys rotated, which makes no difference, because all
            heads of one position are.
    """
    bases, factors = [], []
    for members in clusters:
        if len(members) > 1:
            bases.append(value_basis(values[list(members)]))
            factors.append(key_factors(keys[list(members)], pairs))
    if not joined(clusters):
        return b"", b""
    turned = torch.view_as_real(torch.cat(factors))
    return _bytes(torch.cat(bases)), _bytes(turned)


def value_basis(values: Tensor) -> Tensor:
    """The directions that hold most of what [heads, T, head_dim] are: [heads, head_dim, head_dim].

    The columns of all heads' parts, one above the other, are orthonormal.
    """
    heads, _, dim = values.shape
    rows = values.double().transpose(0, 1).flatten(1)
    moments = rows.t() @ rows
    same = torch.eye(dim, dtype=torch.float64, device=values.device).repeat(heads, heads)
    moments += _prior(moments.diagonal().mean()) * same
    vectors: Tensor = torch.linalg.eigh(moments)[1]
    return vectors[:, -dim:].reshape(heads, dim, dim)


def key_factors(keys: Tensor, pairs: int) -> Tensor:
    """The factor of each rotated pair of [heads, T, head_dim]: [heads, pairs] complex."""
    real, imaginary = keys[..., :pairs].double(), keys[..., pairs : 2 * pairs].double()
    numbers = torch.complex(real, imaginary)
    moments = torch.einsum("atp,btp->pab", numbers, numbers.conj())
    energy = moments.diagonal(dim1=1, dim2=2).real.mean(1)
    moments += _prior(energy)[:, None, None]
    vectors: Tensor = torch.linalg.eigh(moments)[1]
    return vectors[:, :, -1].t()


def _prior(energy: Tensor) -> Tensor:
    return torch.where(energy > 0, _PRIOR * energy, 1.0)


def _bytes(numbers: Tensor) -> bytes:
    return numbers.float().cpu().contiguous().numpy().tobytes()
