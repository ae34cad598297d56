"""What /openapi.json promises, tried on a real daemon with generated requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
EXAMPLES = 15  # of each operation with a body, and mode
BARE_EXAMPLES = 5  # of each without: a few parameters at most


def bounded(operation: Any) -> settings:
    """No shrinking: each example is a call, and the failing one is told as it is."""
    return settings(
        max_examples=EXAMPLES if operation.body else BARE_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def can_be_wrong(operation: Any) -> bool:
    """Whether a request may break what is documented: any text is right as a part of the path."""
    return bool(operation.body or operation.query or operation.headers)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model: Path = write_model(tmp_path_factory.mktemp("model") / "tiny", max_position=256)
    limits = ("memory.limit=4096 tokens", "server.max_choices=4")
    with serving(tmp_path_factory.mktemp("state"), str(model), *limits) as served:
        yield served
        served.assert_idle()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_documented(daemon: Daemon, mode: schemathesis.GenerationMode) -> None:
    """No 500, and no status or content type that the document does not name."""
    document = schemathesis.openapi.from_url(f"{daemon.url}/openapi.json")
    faults: dict[str, str] = {}
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is schemathesis.GenerationMode.NEGATIVE and not can_be_wrong(operation):
            continue

        @bounded(operation)
        @given(operation.as_strategy(generation_mode=mode))
        def answers(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=30)

        try:
            answers()
        except FailureGroup as fault:
            faults[operation.label] = str(fault)
    assert not faults, "\n".join(f"{label}: {fault}" for label, fault in faults.items())
