"""`memd alerts`: how what the daemon answers is shown; what it does is in tests/integration."""

import pytest

RULE = {
    **{"name": "MemdEngineStalled", "severity": "page", "state": "ok", "for_seconds": 60},
    **{"unit": "seconds", "direction": "above", "evaluated_by": ["memd", "prometheus"]},
    "runbook_url": "docs/runbooks/MemdEngineStalled.md",
}


@pytest.mark.parametrize(
    ("value", "met", "told"),
    [
        (90.0, False, "above 60 s, but another condition is not met"),
        (90.0, True, "above 60 s"),
        (30.0, False, "above 60 s"),
    ],
)
def test_a_rule_says_why_it_is_quiet_past_its_limit(daemon, memd, value, met, told):
    seen = {"labels": {}, "value": value, "threshold": 60.0, "met": met}
    daemon.answers["GET /admin/v1/alerts/rules"] = (200, {"rules": [RULE | {"values": [seen]}]})
    (line,) = memd("alerts", "rules").stdout.splitlines()[1:]
    assert f"  {told}  docs" in line
