"""Over HTTP: what an alert rule would have done with another limit."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from memd_alerts.trial import TrialError
from starlette.responses import Response

from memd.alert_trial import TrialRunning, Trials
from memd.api.admin_history import Seconds, check_range
from memd.api.body import json_response
from memd.api.errors import ApiError
from memd.api.schemas import answers
from memd.api.service import Service
from memd.errors import RequestError

USUAL_SECONDS = 7 * 86_400.0
MAX_SECONDS = 31 * 86_400.0


def trial_routes(service: Service, require_on: Any) -> APIRouter:
    """The route under /alerts/rules.

    Args:
        service: Its store holds the samples.
        require_on: Gives the alerting, or raises ApiError.
    """
    router = APIRouter()
    trials = Trials(service.store)

    @router.get("/rules/{name}/trial", responses=answers(400, 404, 409))
    async def trial(
        name: str,
        threshold: Annotated[float | None, Query(ge=-1e300, le=1e300, description="Limit")] = None,
        for_seconds: Annotated[int | None, Query(ge=0, le=86_400, description="Hold time")] = None,
        since: Seconds = None,
        until: Seconds = None,
    ) -> Response:
        rules = require_on().rules
        end = time.time() if until is None else until
        start = max(0.0, end - USUAL_SECONDS) if since is None else since
        check_range(start, end)
        if end - start > MAX_SECONDS:
            raise RequestError(
                f"since is {(end - start) / 86_400:.1f} days before until; the limit is 31 days",
                "since",
            )
        try:
            found = await trials.run(rules, name, threshold, for_seconds, start, end)
        except KeyError:
            raise ApiError(404, f"no rule is named {name[:60]!r}", "not_found", "name") from None
        except (TrialError, TrialRunning) as error:
            raise ApiError(409, str(error), "refused") from None
        return json_response(found)

    return router
