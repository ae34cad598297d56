"""Tells an Alertmanager what fires, over its v2 API, with the names and labels Prometheus uses.

Alertmanager takes two reports with the same labels as one alert, so both may report. What is sent
anew keeps an alert alive there; what is not sent any more ends at its `endsAt`.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import httpx2

from memd_alerts.state import Alert

RESEND_SECONDS = 60.0
_TIMEOUT_SECONDS = 10.0


def payload(
    alerts: Iterable[Alert], now: float, every_seconds: float, runbooks: str
) -> list[dict[str, Any]]:
    """The body of POST /api/v2/alerts.

    Args:
        alerts: Firing and resolved ones; pending ones are left out.
        now: Unix seconds.
        every_seconds: How often the rules are evaluated.
        runbooks: Where the runbook pages are.
    """
    lasts = 4 * max(RESEND_SECONDS, every_seconds)  # as Prometheus has it
    body = []
    for alert in alerts:
        if alert.fired_at is None:
            continue
        ends_at = now + lasts if alert.resolved_at is None else alert.resolved_at
        body.append(
            {
                "labels": alert.labels,
                "annotations": {
                    "summary": alert.summary,
                    "runbook_url": f"{runbooks}/{alert.rule}.md",
                },
                "startsAt": _rfc3339(alert.fired_at),
                "endsAt": _rfc3339(ends_at),
            }
        )
    return body


def test_payload(instance: str, who: str, now: float) -> list[dict[str, Any]]:
    """The body of a test: an alert that ends by itself after a minute."""
    return [
        {
            "labels": {"alertname": "MemdTest", "severity": "ticket", "instance": instance},
            "annotations": {"summary": f"A test asked for by {who}; it ends by itself"},
            "startsAt": _rfc3339(now),
            "endsAt": _rfc3339(now + 60),
        }
    ]


def post(url: str, body: list[dict[str, Any]]) -> str | None:
    """Send. Call it on a thread.

    Returns:
        Why it failed; None: it was accepted.
    """
    transport = httpx2.HTTPTransport(verify=url.startswith("https:"))
    try:
        with httpx2.Client(transport=transport, timeout=_TIMEOUT_SECONDS) as client:
            answer = client.post(f"{url}/api/v2/alerts", json=body)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return f"alertmanager: {type(error).__name__}"
    return None if answer.is_success else f"alertmanager: HTTP {answer.status_code}"


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
