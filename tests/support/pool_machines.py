"""The machines of `test_pool_machine.py`, for the files of tests that go on from them."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "pool_machine", Path(__file__).parents[1] / "property" / "test_pool_machine.py"
)
assert _spec is not None
assert _spec.loader is not None
pool_machine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pool_machine)
