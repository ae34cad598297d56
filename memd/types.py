"""Names of things that every layer shares. No behaviour, no imports from memd."""

from typing import Literal, NewType, Protocol

PageId = NewType("PageId", int)
BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)  # place of a page in the host tier
TransferId = NewType("TransferId", int)
RequestId = NewType("RequestId", str)

Tier = Literal["device", "host", "disk"]
TransferPath = Literal["d2h", "h2d"]  # between device and host
FilePath = Literal["h2f", "f2h"]  # between host and disk
DiskFault = Literal["full", "denied", "gone", "failed"]  # what the file system has refused
BadFile = Literal["version", "model", "truncated", "altered", "tokens"]  # why one is no hit
EvictionReason = Literal["watermark", "ahead", "allocation", "admin"]
PrefixOrder = Literal["tokens", "hits", "hits_per_hour", "last_hit", "start"]
PinOutcome = Literal["pinned", "renewed", "refused", "expired", "released", "lost"]
FinishReason = Literal["stop", "length", "abort", "error"]
StallCause = Literal["allocation", "transfer", "preempted"]


class BlockBacking(Protocol):
    """What the pool asks of the arena: memory behind whole blocks."""

    def commit(self, block: BlockId) -> None:
        """Put memory behind a block. Raises OutOfDeviceMemory; then nothing has changed."""

    def decommit(self, block: BlockId) -> None:
        """Give a block's memory back to the driver."""
