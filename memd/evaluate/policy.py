"""What is compared: how the KV of a sequence is kept. Pure."""

from dataclasses import dataclass
from typing import Literal

from memd_kernels.formats import FORMAT_NAMES, FormatName

from memd.errors import RequestError
from memd.pool.packing import PackingSchedule

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
        sinks: First tokens that it sees besides the window.

    Raises:
        RequestError: a number is below its least value, or there are sinks without a window.
    """

    kv: KVFormat = "full"
    full_precision_tokens: int = 128
    recent_tokens: int = 128
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        leasts = {"full_precision_tokens": 0, "recent_tokens": 0, "window": 1, "sinks": 0}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{value} is below {least}", name.replace("_", "-"))
        if self.sinks and self.window is None:
            raise RequestError(f"{self.sinks} tokens besides a window, and no window", "sinks")

    @property
    def changes_nothing(self) -> bool:
        """Whether this is full KV, as the model asks for it."""
        return self.kv == "full" and self.window is None

    def held_pages(self, page_tokens: int, num_tokens: int) -> list[int]:
        """Indices of the pages of `num_tokens` tokens that the next token sees something of."""
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
