"""Faults over HTTP: only where the daemon was started for it, and kept for engines to come."""

from collections.abc import Callable
from typing import Any

import pytest
from http_stand import Stand

from memd.engine.messages import ArmFaults
from memd.faults import FaultPlan

PATH = "/admin/v1/debug/faults"


@pytest.fixture
def faulty(make_stand: Callable[..., Stand]) -> Stand:
    return make_stand(settings={"debug.faults": True})


def test_they_are_refused_where_debug_faults_is_off(stand: Stand) -> None:
    for response in (stand.http.get(PATH), stand.http.put(PATH, json={})):
        assert response.status_code == 409
        assert "debug.faults is off" in response.json()["error"]["message"]
    assert stand.engine.of(ArmFaults) == []
    assert stand.http.get("/admin/v1/status").json()["faults"] is None


def test_debug_faults_is_not_live(stand: Stand) -> None:
    body = {"revision": 1, "reason": "test", "changes": {"debug.faults": True}}
    response = stand.http.patch("/admin/v1/settings", json=body)
    assert response.status_code == 400
    assert stand.http.put(PATH, json={}).status_code == 409


def test_a_plan_replaces_the_one_before(faulty: Stand) -> None:
    first = {"delay_copies_seconds": 0.5, "requests": {"*": "nan"}}
    assert faulty.http.put(PATH, json=first).json() == {"armed": first, "injected": {}}
    assert faulty.http.get("/admin/v1/status").json()["faults"] == first
    assert faulty.http.put(PATH, json={"fail_commits": 2}).json()["armed"] == {"fail_commits": 2}
    plans = [message.plan for message in faulty.engine.of(ArmFaults)]
    assert plans == [
        FaultPlan(delay_copies_seconds=0.5, requests={"*": "nan"}),
        FaultPlan(fail_commits=2),
    ]
    assert faulty.http.get(PATH).json()["armed"] == {"fail_commits": 2}
    assert faulty.engine.of(ArmFaults)[-1].plan is None


@pytest.mark.parametrize(
    "plan",
    [
        {"fail_comits": 1},
        {"fail_commits": -1},
        {"fail_restores": 1.5},
        {"nan_in_free_pages": 1},
        {"requests": {"x": "explode"}},
        {"requests": ["x"]},
    ],
)
def test_plans_that_say_nothing_clear(faulty: Stand, plan: dict[str, Any]) -> None:
    response = faulty.http.put(PATH, json=plan)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(next(iter(plan)))
    assert faulty.engine.of(ArmFaults) == []
