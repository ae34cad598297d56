"""Markers by folder, and settings that keep tests apart from the machine they run on."""

import os
from pathlib import Path

import pytest
from depth import PROFILE
from hypothesis import settings

# Workers with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TESTS = Path(__file__).parent

# `TEST_PROFILE=deep pytest --timeout=0 tests/property` is for a change of the pool or of settings;
# in tests/integration/test_smollm2.py it is for a change of the decoder.
settings.register_profile("deep", max_examples=10_000, deadline=None)
settings.register_profile("default", deadline=None)
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "e2e":
            item.add_marker(pytest.mark.e2e)
    # Long files first: workers that take a file at a time then end at about the same time.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that tests have recorded, from whatever worker they ran on."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(value))
