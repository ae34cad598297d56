"""Bodies of the routes for prefixes and tenants. A misspelt field is refused."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memd.api.schemas import INT64_MAX, refuse

MAX_PIN_SECONDS = 10 * 365 * 86400.0
Source = Literal["api", "cli", "dashboard"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Authored(_Body):
    reason: str = Field(min_length=1, max_length=500)
    who: Annotated[str, Field(min_length=1, max_length=100)] | None = None


class PinRequest(_Authored):
    """Body of POST /admin/v1/prefixes/{id}/pin."""

    ttl_seconds: (
        Annotated[
            float, Field(gt=0, le=MAX_PIN_SECONDS, description="null: until it is taken back")
        ]
        | None
    ) = None


class PrefixAction(_Authored):
    """Body of POST /admin/v1/prefixes/{id}/unpin and evict."""


class RequestChange(_Body):
    """Body of PATCH /admin/v1/requests/{id}."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, description="Lower first")]
    reason: Annotated[str, Field(max_length=500)] | None = None


class ExplainRequest(_Body):
    """Body of POST /admin/v1/prefixes/explain: a prompt, its ids, or an open request."""

    prompt: str | None = None
    tokens: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)] | None
    ) = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tenant: Annotated[
        str, Field(max_length=64, pattern=r"^[^\x00]*$", description="Whose cache is looked into")
    ] = ""
    cache_salt: Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")] | None = None

    @model_validator(mode="after")
    def _one(self) -> "ExplainRequest":
        given = [self.prompt, self.tokens, self.request_id]
        if sum(each is not None for each in given) != 1:
            refuse("prompt", "give one of prompt, tokens and request_id")
        if self.prompt is not None and "\0" in self.prompt:
            refuse("prompt", "prompt contains the character U+0000")
        return self


class TenantRequest(_Authored):
    """Body of PUT /admin/v1/tenants/{name}: all of it; what is left out is as by default."""

    quota: str | Annotated[int, Field(le=INT64_MAX)] | None = Field(
        None, description="Such as 20% of the pool, or 2GB; null: none"
    )
    weight: float = Field(1.0, gt=0, le=1000)
    revision: Annotated[
        int | None, Field(ge=1, le=INT64_MAX, description="Of the settings; default: the current")
    ] = None
    persist: Annotated[bool, Field(description="Keep it over a restart")] = False
    source: Source = "api"


class TenantRemoval(_Authored):
    """Body of DELETE /admin/v1/tenants/{name}."""

    persist: bool = False
    source: Source = "api"


POOL_SCHEMAS = (
    RequestChange,
    PinRequest,
    PrefixAction,
    ExplainRequest,
    TenantRequest,
    TenantRemoval,
)
