"""Settings of how keys and values are kept."""

from pydantic import Field, model_validator

from memd.config_types import Section
from memd.types import DropPolicy


class KvSettings(Section):
    """What a token sees of the text before it, and what a sequence holds of it."""

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
        description="Most tokens that a sequence holds, in whole pages; not beside `kv.window`",
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
