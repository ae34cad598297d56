"""Settings of how keys and values are kept."""

from typing import Literal

from pydantic import Field, model_validator

from memd.config_types import Section
from memd.errors import SettingsError
from memd.types import DropPolicy, KVFormat

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
        description="First tokens that stay besides, where `kv.window` or `kv.budget` applies",
        json_schema_extra={"unit": "tokens"},
    )
    budget: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="Most tokens that a sequence holds, in whole pages; not beside `kv.window` or "
        "a packed `kv.format`",
        json_schema_extra={"unit": "tokens"},
    )
    drop_policy: DropPolicy = Field(
        "recency",
        description="What goes when `kv.budget` is full: the oldest, or what is attended to least",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> "KvSettings":
        if self.window is not None and self.budget is not None:
            raise ValueError("budget cannot be set together with window: either bounds a sequence")
        return self


def check_kv_format(kv: KvSettings, page_tokens: int | Literal["auto"]) -> None:
    """Refuse what cannot be had with packed pages: a budget, and some sizes of pages.

    Raises:
        SettingsError: names the setting, its value and the limit.
    """
    if kv.format == "full":
        return
    if kv.budget is not None:
        raise SettingsError(
            {
                "kv.budget": f"is {kv.budget}, must be null where kv.format is {kv.format}: with a "
                "budget pages are not packed"
            }
        )
    if page_tokens == "auto":
        return
    if page_tokens < LEAST_PACKED_PAGE_TOKENS or page_tokens & (page_tokens - 1):
        raise SettingsError(
            {
                "memory.page_tokens": f"is {page_tokens}, must be a power of two from "
                f"{LEAST_PACKED_PAGE_TOKENS} on where kv.format is {kv.format}"
            }
        )
