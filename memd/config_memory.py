"""Settings of the elastic pool."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from memd.config_types import LIVE, Auto, DurationSeconds, Section, Share
from memd.units import parse_size_or_zero


class DefragSettings(Section):
    """When pages are moved together, so that whole blocks become empty."""

    every_requests: int = Field(
        100,
        ge=0,
        description="A run after so many finished requests; 0: not for that",
        json_schema_extra={**LIVE, "unit": "requests"},
    )
    max_fragmentation: Share = Field(
        0.15,
        description="Share of blocks in use that could be emptied; runs keep it below. 100%: any",
        json_schema_extra=LIVE,
    )
    pages_per_step: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="Most pages moved in one step; auto: what a step hardly notices",
        json_schema_extra=LIVE,
    )


class ElasticSettings(Section):
    """When the pool gives memory back that it could keep."""

    idle: DurationSeconds = Field(
        60.0, description="Blocks that hold nothing go after this", json_schema_extra=LIVE
    )
    reserve: Auto | Annotated[int, BeforeValidator(parse_size_or_zero)] = Field(
        "auto",
        description="Device memory left free for others, at the cost of cached pages; 0: none; "
        "auto: 512MiB of a GPU, 256MiB of a machine",
        json_schema_extra=LIVE,
    )
