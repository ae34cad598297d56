"""Bodies of the routes for traces. A misspelt field is refused."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from memd.api.schemas_settings import Name, Reason


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TraceStop(_Body):
    """Body of POST /admin/v1/traces/stop."""

    reason: Reason
    who: Name | None = None


class TraceStart(TraceStop):
    """Body of POST /admin/v1/traces/start."""

    tenant_names: Annotated[bool, Field(description="Tenants by name; otherwise as digests")] = (
        False
    )


TRACE_SCHEMAS = (TraceStart, TraceStop)
