"""Names of things that every layer shares. No behaviour, no imports from memd."""

from typing import Literal, NamedTuple, NewType, Protocol

PageId = NewType("PageId", int)
BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)  # place of a page in the host tier
TransferId = NewType("TransferId", int)
RequestId = NewType("RequestId", str)

PACKED_PAGE = 1 << 30  # in an entry of the kernels' page tables: the page is packed

Tier = Literal["device", "host", "disk"]
TransferPath = Literal["d2h", "h2d"]  # between device and host
FilePath = Literal["h2f", "f2h"]  # between host and disk
DiskFault = Literal["full", "denied", "gone", "failed"]  # what the file system has refused
BadFile = Literal[  # why a page file is no hit
    "version", "format", "model", "truncated", "altered", "tokens"
]
KVFormat = Literal["full", "int8", "int4", "fp8"]  # of pages; `full`: the model's dtype
DropPolicy = Literal["recency", "attention_share"]  # what a running sequence lets go of first
EvictionReason = Literal["watermark", "ahead", "allocation", "admin"]
PrefixOrder = Literal["tokens", "hits", "hits_per_hour", "last_hit", "start"]
DefragReason = Literal["requests", "fragmentation", "limit", "pressure", "idle", "admin"]
LimitWait = Literal["requests", "pins", "reclaim", "moves"]
GrowReason = Literal["demand", "ahead"]
ShrinkReason = Literal["limit", "pressure", "idle", "admin"]
PinOutcome = Literal["pinned", "renewed", "refused", "expired", "released", "lost"]
FinishReason = Literal["stop", "length", "abort", "error"]
StallCause = Literal["allocation", "transfer", "preempted"]


# What was found of a prompt could not be used in time; what follows it was evicted, is another
# tenant's or salt's, goes on differently, or has never been seen.
MissReason = Literal["unusable", "evicted", "isolated", "differs", "unseen"]


class PrefixMiss(NamedTuple):
    """Prompt tokens that had to be computed, without the last one, which always is.

    Args:
        tokens: How many.
        evicted_tokens: Of those: were there, and were evicted within the regret window.
        first_token: Position of the first.
        reason: Why it was not found.
    """

    tokens: int
    evicted_tokens: int
    first_token: int
    reason: MissReason


class BlockBacking(Protocol):
    """What the pool asks of the arena: memory behind whole blocks."""

    def commit(self, block: BlockId) -> None:
        """Put memory behind a block. Raises OutOfDeviceMemory; then nothing has changed."""

    def settle(self) -> None:
        """Wait until nothing that was enqueued on the device so far still reads or writes."""

    def decommit(self, block: BlockId) -> None:
        """Give a block's memory back to the driver; nothing on the device reads it any more."""
