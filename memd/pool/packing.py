"""When the pages of a sequence are packed. Pure; used by the pool and by `memd eval`.

What a token sees of the tokens before it must not depend on how the prompt was cut into chunks, or
on what was found in the cache: else one prompt gives two texts. So which pages are packed depends
on the number of tokens alone, and changes only at multiples of a step; whoever computes chunks that
do not cross such a multiple computes the same as one token at a time.
"""

from dataclasses import dataclass

LEAST_STEP_TOKENS = 64


def packing_step_tokens(page_tokens: int) -> int:
    """Tokens from one packing of a sequence to the next: whole pages, 64 tokens or more."""
    return -(-LEAST_STEP_TOKENS // page_tokens) * page_tokens


@dataclass(frozen=True)
class PackingSchedule:
    """Which pages of a sequence are packed at which length.

    Args:
        page_tokens: Tokens of a page, of either format.
        full_precision_tokens: First tokens of a sequence, in pages that are never packed.
        recent_tokens: Last tokens of a sequence, in pages that are not packed yet; at least so
            many, and less than a page and a step more.

    Raises:
        ValueError: a number is below its least value.
    """

    page_tokens: int
    full_precision_tokens: int
    recent_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("page_tokens", 1), ("full_precision_tokens", 0), ("recent_tokens", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}, must be {least} or more")

    def packed_pages(self, num_tokens: int) -> range:
        """Indices in the page table of the pages that are packed.

        Args:
            num_tokens: Length of the sequence. Its next token sees these pages packed, and all
                others full.
        """
        step = packing_step_tokens(self.page_tokens)
        first = -(-self.full_precision_tokens // self.page_tokens)
        counted = num_tokens // step * step
        return range(first, max(first, (counted - self.recent_tokens) // self.page_tokens))
