"""Checks what the pool knows of its disk tier against the tree and the host tier."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memd.pool.pool import Pool


def check_disk(pool: "Pool") -> list[str]:
    """Every contradiction, in words. Changes nothing, reads no file."""
    disk, problems = pool.disk, []
    moves = disk.under_way
    reads = {move.node: number for number, move in moves.items() if _is_read(move.transfer.path)}
    reads.pop(None, None)
    if reads != disk.reading:
        problems.append("pages that are being read from disk are not those that are noted")
    problems += [
        f"host slot {node.host} is read into from disk and is not that node's"
        for node, number in disk.reading.items()
        if node.host != moves[number].transfer.slot
    ]
    writes = {
        move.transfer.file.key: number
        for number, move in moves.items()
        if not _is_read(move.transfer.path)
    }
    if writes != disk.writing:
        problems.append("pages that are being written to disk are not those that are noted")
    if not disk.index.packed <= set(disk.index.oldest_first()):
        problems.append("a file counts as one of a packed page and is not there")
    problems += [
        f"host slot {move.transfer.slot} and its file are of different formats"
        for move in moves.values()
        if move.transfer.file.packed != (move.transfer.slot in pool.host.packed)
    ]
    if not pool.host.from_disk <= pool.host.holders().keys():
        problems.append("a host slot counts as read from disk and holds nothing")
    if disk.index.complete and disk.index.used_bytes > disk.index.limit_bytes:
        kept = {move.transfer.file.key for move in moves.values()}
        if any(key not in kept for key in disk.index.oldest_first()):
            problems.append(
                f"{disk.index.used_bytes} bytes on disk, {disk.index.limit_bytes} allowed"
            )
    return problems


def _is_read(path: str) -> bool:
    return path == "f2h"
