"""The machines of `tests/property`, for the files of tests that go on from them."""

import importlib.util
from pathlib import Path
from types import ModuleType


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "property" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.removeprefix("test_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pool_machine = _load("test_pool_machine")
disk_machine = _load("test_disk_machine")  # these go on from the one above
budget_machine = _load("test_budget_machine")
