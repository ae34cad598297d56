"""How many pages the setting `memory.limit` comes to. Pure; the engine and the preview use it."""

from memd.errors import SettingsError
from memd.units import parse_share


def limit_pages(
    limit: str | int, base_bytes: int, page_tokens: int, page_bytes: int, block_bytes: int
) -> int:
    """Pages that a limit allows; one in bytes is used in whole blocks.

    Args:
        limit: Bytes, a share such as `80%`, or `1024 tokens`.
        base_bytes: What a share is a share of: memory that was free after loading.
        page_tokens, page_bytes, block_bytes: Of the pool.

    Raises:
        SettingsError: not even one page fits.
    """
    if isinstance(limit, str) and limit.endswith("tokens"):
        pages = int(limit.split()[0]) // page_tokens
    else:
        limit_bytes = limit if isinstance(limit, int) else int(base_bytes * parse_share(limit))
        per_block = block_bytes // page_bytes
        pages = limit_bytes // block_bytes * per_block or min(limit_bytes // page_bytes, per_block)
    if pages < 1:
        raise SettingsError(
            {
                "memory.limit": f"{limit!r} holds no page: one has {page_tokens} tokens and "
                f"{page_bytes} bytes"
            }
        )
    return pages
