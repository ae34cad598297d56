"""Bodies of routes for the operator, besides those of settings, pool and traces."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from memd.api.schemas import INT64_MAX
from memd.faults import MoveFault, RequestFault


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class ReclaimRequest(_Body):
    """Body of POST /admin/v1/pool/reclaim; without pages: down to the low watermark."""

    pages: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None


class SilenceRequest(_Body):
    """Body of POST /admin/v1/alerts/silences."""

    matchers: Annotated[
        dict[
            Annotated[str, Field(min_length=1, max_length=100)],
            Annotated[str, Field(max_length=200)],
        ],
        Field(min_length=1, max_length=10, description="Label: value, or a pattern of * and ?"),
    ]
    seconds: float = Field(ge=1, le=30 * 86400, allow_inf_nan=False)
    reason: str = Field(min_length=1, max_length=500)
    author: Annotated[str, Field(min_length=1, max_length=100)] | None = None


class FaultsRequest(BaseModel):
    """Body of PUT /admin/v1/debug/faults: the whole plan; what is left out does not happen."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    seed: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    fail_commits: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    delay_copies_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    fail_write_backs: Annotated[float, Field(ge=0, le=1)] = 0.0
    fail_restores: Annotated[float, Field(ge=0, le=1)] = 0.0
    delay_files_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    fail_file_writes: Annotated[float, Field(ge=0, le=1)] = 0.0
    fail_file_reads: Annotated[float, Field(ge=0, le=1)] = 0.0
    tear_files: Annotated[float, Field(ge=0, le=1)] = 0.0
    disk_full: bool = False
    nan_in_free_pages: bool = False
    step_clock_seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    requests: dict[str, RequestFault] = Field({}, max_length=1000, description="By id; *: any")
    moves: MoveFault | None = Field(None, description="Of pages within the pool")


ADMIN_SCHEMAS = (ReclaimRequest, SilenceRequest, FaultsRequest)
