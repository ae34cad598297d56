"""Runs a module's tests at both paces of the engine; importing the fixture is enough."""

import pytest
from toy import Harness


@pytest.fixture(autouse=True, params=[0, 1], ids=["in step", "a step ahead"])
def both_paces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Results are read in their own step, or one step later, as on a GPU."""
    pace: int = request.param
    monkeypatch.setattr(Harness, "steps_ahead", pace)
    return pace
