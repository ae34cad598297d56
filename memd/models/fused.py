"""Projections that a checkpoint keeps as one tensor, as Phi-3 does: where their parts are."""

from collections.abc import Mapping

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def parts_of(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """The rows of a fused tensor that each of its parts has, from and up to; empty: it is none.

    Args:
        name: Canonical, such as `layers.0.self_attn.qkv_proj.weight`.
        shapes: Of the parts, by canonical name.
    """
    fused = next((each for each in _FUSED if f".{each}." in name), None)
    if fused is None:
        return {}
    parts = [name.replace(fused, part) for part in _FUSED[fused]]
    if any(part not in shapes for part in parts):
        return {}
    rows: dict[str, tuple[int, int]] = {}
    start = 0
    for part in parts:
        stop = start + shapes[part][0]
        rows[part] = start, stop
        start = stop
    return rows
