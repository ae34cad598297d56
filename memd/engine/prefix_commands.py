"""What an operator tells the engine about a prefix: pin, unpin, evict, explain."""

from array import array
from typing import Any

from memd.engine.messages import Explain, PrefixCommand
from memd.errors import MemdError
from memd.pool.pins import PinRefused
from memd.pool.pool import Pool
from memd.pool.prefix_tree import Node
from memd.pool.prefixes import explain, find_prefix, prefix_id, stretch_of


class PrefixError(MemdError):
    """The command cannot be carried out; in words."""


def explain_prompt(pool: Pool, namespace: str, command: Explain) -> dict[str, Any]:
    """What a prompt would find now.

    Args:
        namespace: What every request shares besides its salt.
    """
    return explain(pool, array("i", command.tokens), f"{namespace}/{command.salt}")


def prefix_command(pool: Pool, command: PrefixCommand) -> dict[str, Any]:
    """Carry out a command on a prefix.

    Returns:
        `found`: whether there is a prefix of this id; and what was done.

    Raises:
        PrefixError: there is no such pin.
        PinRefused: the pin would exceed the budget.
    """
    nodes = find_prefix(pool, command.prefix_id)
    if not nodes:
        return {"found": False}
    match command.action:
        case "pin":
            result = _pin(pool, nodes, command.ttl_seconds)
        case "unpin":
            result = _unpin(pool, nodes)
        case "evict":
            freed, kept = pool.drop_prefix(nodes[0])
            result = {"evicted_pages": freed, "kept_pages": kept}
    return {"found": True, "id": command.prefix_id, **result}


def _pin(pool: Pool, nodes: list[Node], ttl_seconds: float | None) -> dict[str, Any]:
    node = nodes[-1]
    if node.end < pool.layout.page_tokens:  # the last, part-filled page of a finished sequence
        node = pool.tree.page_parent(node)
    if node.is_root:
        raise PinRefused(
            f"the prefix has {nodes[-1].end} tokens, whole pages of {pool.layout.page_tokens} "
            "tokens can be pinned"
        )
    pin = pool.pins.pin(node, ttl_seconds, "")
    return {
        "pinned_tokens": len(pin.nodes) * pool.layout.page_tokens,
        "pinned_pages": len(pin.nodes),
        "arriving_pages": len(pin.nodes) - pin.covered,
        "pin_left_seconds": None if pin.expires_at is None else pin.expires_at - pool.now(),
        "promised_pages": pool.pins.promised_pages,
        "pin_limit_pages": pool.pins.limit_pages,
    }


def _unpin(pool: Pool, nodes: list[Node]) -> dict[str, Any]:
    pins = [pool.pins.by_node[node] for node in nodes if node in pool.pins.by_node]
    if not pins:
        pin = pool.pins.covering().get(nodes[0])
        if pin is None:
            raise PrefixError(f"the prefix {prefix_id(nodes[0])} is not pinned")
        below = stretch_of(pool, pin.nodes[-1])
        raise PrefixError(
            f"the prefix {prefix_id(nodes[0])} is pinned as the beginning of "
            f"{prefix_id(below[0])}: unpin that"
        )
    for pin in pins:
        pool.pins.release(pin)
    return {"released_pins": len(pins)}
