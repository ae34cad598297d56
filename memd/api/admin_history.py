"""What was, over HTTP: events, samples for charts, finished requests. Read from the database."""

import time
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from memd.api.body import json_response
from memd.api.schemas import answers
from memd.api.service import Service
from memd.errors import RequestError
from memd.observe.catalog.requests import OUTCOMES
from memd.store.reads import MAX_POINTS, rows_of, samples_of, usual_step

_HOUR_SECONDS = 3600.0
_LATEST = 1e11  # year 5138; keeps arithmetic with times finite

Seconds = Annotated[float | None, Query(ge=0, le=_LATEST, description="Unix seconds")]
Limit = Annotated[int, Query(ge=1, le=10_000)]
Name = Annotated[str | None, Query(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]


def history_routes(service: Service) -> APIRouter:
    """The routes over what the database holds."""
    router = APIRouter(responses=answers(400))
    store = service.store

    @router.get("/events")
    async def events(
        kind: Name = None, since: Seconds = None, until: Seconds = None, limit: Limit = 100
    ) -> Response:
        check_range(since, until)
        rows, more = await store.query(rows_of("events", since, until, limit, kind=kind))
        return json_response({"events": rows, "more": more})

    @router.get("/samples")
    async def samples(
        metric: Annotated[str, Query(min_length=1, max_length=200, pattern=r"^[^\x00]*$")],
        since: Seconds = None,
        until: Seconds = None,
        step: Annotated[float | None, Query(ge=1, le=86_400, description="Seconds")] = None,
    ) -> Response:
        end = time.time() if until is None else until
        start = max(0.0, end - _HOUR_SECONDS) if since is None else since
        check_range(start, end)
        step_seconds = usual_step(start, end) if step is None else step
        points = (end - start) / step_seconds
        if points > MAX_POINTS:
            raise RequestError(
                f"step is {step_seconds:g} s, which gives {points:.0f} points from since to until; "
                f"the limit is {MAX_POINTS}",
                "step",
            )
        series, more = await store.query(samples_of(metric, start, end, step_seconds))
        head = {"metric": metric, "since": start, "until": end, "step_seconds": step_seconds}
        return json_response({**head, "series": series, "more": more})

    @router.get("/history/requests")
    async def requests(
        since: Seconds = None,
        until: Seconds = None,
        tenant: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
        outcome: Name = None,
        limit: Limit = 100,
    ) -> Response:
        check_range(since, until)
        if outcome is not None and outcome not in OUTCOMES:
            raise RequestError(
                f"outcome is {outcome[:40]!r}, it must be one of {', '.join(OUTCOMES)}", "outcome"
            )
        read = rows_of("requests", since, until, limit, tenant=tenant, outcome=outcome)
        rows, more = await store.query(read)
        return json_response({"requests": rows, "more": more})

    return router


def check_range(since: float | None, until: float | None) -> None:
    """Raises RequestError unless `since` is before `until`."""
    if since is not None and until is not None and since >= until:
        raise RequestError(f"since is {since:.3f}, it must be before until, {until:.3f}", "since")
