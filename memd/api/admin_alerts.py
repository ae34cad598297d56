"""Alerts over HTTP: what fires, the rules, incidents, silences, channels."""

import time
from typing import Any

from fastapi import APIRouter, Request
from memd_alerts.channels import ALERTMANAGER
from memd_alerts.notify import news
from memd_alerts.promql import promql
from memd_alerts.rules import Rule
from memd_alerts.state import Alert, ChannelState, Silence
from starlette.responses import Response

from memd.alerting import AlertError, Alerting
from memd.api.admin_alert_trials import trial_routes
from memd.api.admin_history import Limit, Seconds
from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError
from memd.api.schemas import answers
from memd.api.schemas_admin import SilenceRequest
from memd.api.service import Service
from memd.errors import RequestError
from memd.store.reads import rows_of

_ORDER = {"firing": 0, "pending": 1, "resolved": 2}


def alert_routes(service: Service) -> APIRouter:
    """The routes under /alerts."""
    router = APIRouter(prefix="/alerts")

    def require_on() -> Alerting:
        if service.alerting is None:
            raise ApiError(409, "alerts.enabled is off; it can be set at the start only", "refused")
        return service.alerting

    @router.get("", responses=answers(409))
    async def alerts() -> Response:
        alerting = require_on()
        now, state = time.time(), alerting.state
        rows = [_alert(alerting, each, now) for each in state.alerts]
        rows.sort(key=lambda row: (_ORDER[row["state"]], -(row["fired_at"] or row["since"])))
        return json_response({"alerts": rows, "evaluated_at": state.evaluated_at})

    @router.get("/rules", responses=answers(409))
    async def rules() -> Response:
        alerting = require_on()
        return json_response({"rules": [_rule(alerting, each) for each in alerting.rules.rules]})

    @router.get("/incidents", responses=answers(400))
    async def incidents(since: Seconds = None, limit: Limit = 100) -> Response:
        rows, more = await service.store.query(rows_of("incidents", since, None, limit))
        found = [_incident(service.alerting, row) for row in rows]
        return json_response({"incidents": found, "more": more})

    router.include_router(trial_routes(service, require_on))
    _add_silence_routes(router, service, require_on)
    _add_channel_routes(router, require_on)
    return router


def _add_silence_routes(router: APIRouter, service: Service, require_on: Any) -> None:
    @router.get("/silences", responses=answers(409))
    async def silences() -> Response:
        alerting, now = require_on(), time.time()
        return json_response(
            {"silences": [_silence(alerting, each, now) for each in alerting.silences()]}
        )

    @router.post(
        "/silences",
        openapi_extra=body_schema(SilenceRequest),
        responses=answers(400, 408, 409, 413),
    )
    async def silence(request: Request) -> Response:
        alerting = require_on()
        body = await read_body(request, SilenceRequest, service.limits)
        author = request.state.caller.name or body.author or "local"
        try:
            made = await alerting.silence(body.matchers, body.seconds, body.reason, author)
        except AlertError as error:
            raise RequestError(str(error), "matchers") from None
        return json_response(_silence(alerting, made, time.time()))

    @router.delete("/silences/{silence_id}", responses=answers(404, 409))
    async def unsilence(silence_id: str, request: Request) -> Response:
        alerting = require_on()
        ended = await alerting.unsilence(silence_id, request.state.caller.name or "local")
        if ended is None:
            raise ApiError(404, f"no silence has the id {silence_id[:40]!r}", "not_found")
        return json_response(_silence(alerting, ended, time.time()))


def _add_channel_routes(router: APIRouter, require_on: Any) -> None:
    @router.get("/channels", responses=answers(409))
    async def channels() -> Response:
        return json_response({"channels": _channels(require_on())})

    @router.post("/channels/{name}/test", responses=answers(404, 409))
    async def test(name: str, request: Request) -> Response:
        alerting = require_on()
        try:
            error = await alerting.test(name, request.state.caller.name or "local")
        except KeyError:
            raise ApiError(404, f"no channel is named {name[:60]!r}", "not_found") from None
        return json_response({"name": name, "delivered": error is None, "error": error})


def _alert(alerting: Alerting, alert: Alert, now: float) -> dict[str, Any]:
    silence = alerting.state.silenced(alert, now)
    return {
        "id": alert.id,
        "name": alert.rule,
        "labels": alert.labels,
        "severity": alert.labels["severity"],
        "state": alert.state,
        "silenced": silence is not None,
        "silence_id": silence.id if silence is not None else None,
        "value": alert.value,
        "threshold": alert.threshold,
        "peak": alert.peak,
        "unit": _unit(alerting, alert.rule),
        "since": alert.since,
        "known_at": alert.known_at,
        "fired_at": alert.fired_at,
        "resolved_at": alert.resolved_at,
        "summary": alert.summary,
        "told": sorted(name for name, state in alert.told.items() if state == news(alert)),
        "runbook_url": alerting.runbook(alert.rule),
    }


def _rule(alerting: Alerting, rule: Rule) -> dict[str, Any]:
    values = None if rule.prometheus_only else alerting.values()
    outcomes = values.outcomes(rule) if values is not None else {}
    states = [each.state for each in alerting.state.alerts if each.rule == rule.name]
    state: str = min(states, key=_ORDER.__getitem__) if states else "ok"
    if rule.prometheus_only or (not outcomes and state != "firing"):
        state = "unknown"  # as nothing that it looks at is there
    return {
        "name": rule.name,
        "group": rule.group,
        "severity": rule.severity,
        "summary": rule.summary,
        "state": "ok" if state == "resolved" else state,
        "for_seconds": rule.hold,
        "labels": list(rule.by),
        "unit": rule.unit,
        "direction": "above" if rule.above is not None else "below",
        "values": [
            {
                "labels": dict(labels),
                "value": _finite(outcome.value),
                "threshold": _finite(outcome.limit),
                "met": outcome.met,
            }
            for labels, outcome in sorted(outcomes.items())
        ],
        "evaluated_by": ["prometheus"] if rule.prometheus_only else ["memd", "prometheus"],
        "promql": promql(rule, alerting.rules),
        "runbook_url": alerting.runbook(rule.name),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _unit(alerting: Alerting | None, name: str) -> str | None:
    """Of what a rule looks at; None: there is no rule of that name now."""
    rule = None if alerting is None else alerting.rules.rule(name)
    return None if rule is None else rule.unit


def _incident(alerting: Alerting | None, row: dict[str, Any]) -> dict[str, Any]:
    fired, ended = row["fired_at"], row["resolved_at"]
    return {
        "id": row["id"],
        "name": row["name"],
        "labels": row["labels"],
        "severity": row["severity"],
        "state": row["state"],
        "since": row["time"],
        "fired_at": fired,
        "resolved_at": ended,
        "duration_seconds": None if ended is None else round(ended - fired, 3),
        "peak": row["value"],
        "threshold": row["threshold"],
        "unit": _unit(alerting, row["name"]),
        "summary": row["summary"],
    }


def _silence(alerting: Alerting, silence: Silence, now: float) -> dict[str, Any]:
    covered = [each for each in alerting.state.alerts if silence.covers(each.labels, now)]
    return {
        "id": silence.id,
        "matchers": silence.matchers,
        "starts_at": silence.starts_at,
        "ends_at": silence.ends_at,
        "reason": silence.reason,
        "author": silence.author,
        "covers": len(covered),
    }


def _channels(alerting: Alerting) -> list[dict[str, Any]]:
    kinds = {name: channel.kind for name, channel in alerting.channels.items()}
    if alerting.alertmanager:
        kinds[ALERTMANAGER] = ALERTMANAGER
    counts = alerting.notification_counts
    rows = []
    for name, kind in kinds.items():
        state = alerting.state.channels.get(name, ChannelState())
        policy = alerting.channels[name].policy if name in alerting.channels else None
        rows.append(
            {
                "name": name,
                "kind": kind,
                "severities": sorted(policy.severities) if policy else ["page", "ticket"],
                "send_resolved": policy.send_resolved if policy else True,
                "per_minute": policy.per_minute if policy else None,
                "last_sent_at": state.last_sent_at,
                "last_error": state.last_error,
                "failures": state.failures,
                "retry_at": state.retry_at if state.failures else None,
                **{each: counts[name, each] for each in ("sent", "failed", "suppressed")},
            }
        )
    return rows
