"""Settings of how keys and values are kept."""

from typing import Literal

from pydantic import Field

from memd.config_types import Section
from memd.errors import SettingsError

KVFormat = Literal["full", "int8", "int4", "fp8"]

# Pages that can be packed; `memd_kernels.formats.PackedFormat` says why.
LEAST_PACKED_PAGE_TOKENS = 16


class KvSettings(Section):
    """What a token sees of the text before it, and how much memory that takes."""

    format: KVFormat = Field(
        "full",
        description="Of pages: full (the model's dtype), or packed in int8, int4 or fp8",
    )
    full_precision_tokens: int = Field(
        128,
        ge=0,
        le=2**24,
        description="First tokens of a sequence, in pages that are never packed",
        json_schema_extra={"unit": "tokens"},
    )
    recent_tokens: int = Field(
        128,
        ge=0,
        le=2**24,
        description="Last tokens of a sequence, in pages that are not packed yet; at least so many",
        json_schema_extra={"unit": "tokens"},
    )
    window: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="Latest tokens that are seen, in layers that see more; null: as the model asks",
        json_schema_extra={"unit": "tokens"},
    )
    sinks: int = Field(
        4,
        ge=0,
        le=65536,
        description="First tokens that are seen besides, where `kv.window` applies",
        json_schema_extra={"unit": "tokens"},
    )


def check_page_tokens(kv: KvSettings, page_tokens: int | Literal["auto"]) -> None:
    """Refuse pages that cannot be packed in the format that is asked for.

    Raises:
        SettingsError: names the setting, its value and the limit.
    """
    if kv.format == "full" or page_tokens == "auto":
        return
    if page_tokens < LEAST_PACKED_PAGE_TOKENS or page_tokens & (page_tokens - 1):
        raise SettingsError(
            {
                "memory.page_tokens": f"is {page_tokens}, must be a power of two from "
                f"{LEAST_PACKED_PAGE_TOKENS} on where kv.format is {kv.format}"
            }
        )
