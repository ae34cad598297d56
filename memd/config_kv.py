"""Settings of how keys and values are kept."""

from pydantic import Field

from memd.config_types import Section


class KvSettings(Section):
    """What a token sees of the text before it."""

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
