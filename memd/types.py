"""Names of things that every layer shares. No behaviour, no imports from memd."""

from typing import Literal, NewType, Protocol

PageId = NewType("PageId", int)
BlockId = NewType("BlockId", int)
RequestId = NewType("RequestId", str)

Tier = Literal["device", "host", "disk"]
EvictionReason = Literal["watermark", "allocation", "admin"]
FinishReason = Literal["stop", "length", "abort", "error"]


class BlockBacking(Protocol):
    """What the pool asks of the arena: memory behind whole blocks."""

    def commit(self, block: BlockId) -> None:
        """Put memory behind a block. Raises OutOfDeviceMemory; then nothing has changed."""

    def decommit(self, block: BlockId) -> None:
        """Give a block's memory back to the driver."""
