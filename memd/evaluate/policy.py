"""What is compared: how the KV of a sequence is kept. Pure."""

from dataclasses import dataclass
from typing import Literal, get_args

from memd_kernels.formats import FORMAT_NAMES, FormatName

from memd.errors import RequestError
from memd.pool.budget import Budget
from memd.pool.packing import PackingSchedule
from memd.types import DropPolicy

KVFormat = Literal["full"] | FormatName
KV_FORMATS: tuple[KVFormat, ...] = ("full", *FORMAT_NAMES)


@dataclass(frozen=True)
class KVPolicy:
    """How the keys and values of a sequence are kept. Lengths in tokens.

    Args:
        kv: Page format: "full", or the name of a packed one.
        full_precision_tokens: First tokens that stay full; see `PackingSchedule`.
        recent_tokens: Last tokens that stay full.
        window: Tokens that a token sees, itself included; None: as the model.
        sinks: First tokens that it sees besides the window, or that a budget keeps.
        budget: Most tokens that a sequence holds, in whole pages; None: all.
        drop: What goes when the budget is full.

    Raises:
        RequestError: a number is below its least value, there are sinks without a window or a
            budget, or a budget beside a window or packed pages.
    """

    kv: KVFormat = "full"
    full_precision_tokens: int = 128
    recent_tokens: int = 128
    window: int | None = None
    sinks: int = 0
    budget: int | None = None
    drop: DropPolicy = "recency"

    def __post_init__(self) -> None:
        leasts = {"full_precision_tokens": 0, "recent_tokens": 0, "window": 1, "sinks": 0}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{value} is below {least}", name.replace("_", "-"))
        if self.sinks and self.window is None and self.budget is None:
            raise RequestError(
                f"{self.sinks} tokens besides a window, and no window or budget", "sinks"
            )
        if self.budget is not None and self.window is not None:
            raise RequestError("a window bounds what is held already", "budget")
        if self.budget is not None and self.kv != "full":
            raise RequestError(f"keeps full pages only, not {self.kv}", "budget")

    @property
    def changes_nothing(self) -> bool:
        """Whether this is full KV, as the model asks for it."""
        return self.kv == "full" and self.window is None and self.budget is None

    def bound(self, page_tokens: int) -> Budget | None:
        """The budget in pages.

        Raises:
            RequestError: it is too small.
        """
        if self.budget is None:
            return None
        sink_pages = -(-self.sinks // page_tokens)
        try:
            return Budget(self.budget // page_tokens, sink_pages, self.drop, page_tokens)
        except ValueError as error:
            raise RequestError(str(error), "budget") from None

    def held_pages(self, page_tokens: int, num_tokens: int) -> list[int]:
        """Indices of the pages of `num_tokens` tokens that the next token sees something of.

        Under a budget: that are held with the last of them; by attention share as many, and which
        is found out.
        """
        bound = self.bound(page_tokens)
        if bound is not None:
            count = -(-num_tokens // page_tokens)
            gone = max(0, count - bound.pages)
            if bound.policy == "recency":
                gone = -(-gone // bound.segment_pages) * bound.segment_pages
            return [*range(min(bound.sink_pages, count)), *range(bound.sink_pages + gone, count)]
        first = 0 if self.window is None else max(0, num_tokens + 1 - self.window) // page_tokens
        count = -(-num_tokens // page_tokens)
        sinks = min(-(-self.sinks // page_tokens), first)
        return [*range(min(sinks, count)), *range(first, count)]

    def packed_pages(self, page_tokens: int, num_tokens: int) -> list[int]:
        """Indices of those that are packed."""
        if self.kv == "full":
            return []
        schedule = PackingSchedule(page_tokens, self.full_precision_tokens, self.recent_tokens)
        due = schedule.packed_pages(num_tokens)
        return [index for index in self.held_pages(page_tokens, num_tokens) if index in due]


def read_formats(text: str) -> list[KVFormat]:
    """Page formats from a list such as "full,int8".

    Raises:
        RequestError: a name is empty, unknown or there twice; the message says which are known.
    """
    by_name = {str(name): name for name in KV_FORMATS}
    names = [name.strip() for name in text.split(",")]
    for index, name in enumerate(names):
        if name not in by_name:
            raise RequestError(f"{name!r} is none of {', '.join(KV_FORMATS)}", "kv")
        if name in names[:index]:
            raise RequestError(f"{name} is there twice", "kv")
    return [by_name[name] for name in names]


def read_drop_policies(text: str | None, budget: int | None) -> list[DropPolicy]:
    """Drop policies from a list such as "recency,attention_share"; None: recency.

    Raises:
        RequestError: a name is unknown or there twice, or there is no budget to drop by.
    """
    if text is None:
        return ["recency"]
    if budget is None:
        raise RequestError("tells what a budget lets go of, and there is none", "drop")
    known: dict[str, DropPolicy] = {name: name for name in get_args(DropPolicy)}
    names = [name.strip() for name in text.split(",")]
    for index, name in enumerate(names):
        if name not in known:
            raise RequestError(f"{name!r} is none of {', '.join(known)}", "drop")
        if name in names[:index]:
            raise RequestError(f"{name} is there twice", "drop")
    return [known[name] for name in names]
