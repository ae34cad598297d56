"""Puts live settings in force: most in the engine, between two of its steps."""

from typing import Any

from memd.api.engine_client import EngineClient
from memd.engine.messages import ApplySettings
from memd.settings import Apply

# By the api process, from the tree in force.
_READ_HERE = {"engine.max_waiting", "trace.record", "trace.limit", "trace.tenant_names"}


def settings_applier(engine: EngineClient) -> Apply:
    """What LiveSettings needs to apply a revision. It raises ApiError when the engine refuses."""

    async def apply(revision: int, values: dict[str, Any]) -> None:
        theirs = {key: value for key, value in values.items() if key not in _READ_HERE}
        if theirs:
            await engine.command(ApplySettings, revision=revision, values=theirs)

    return apply
