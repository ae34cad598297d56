"""How much of the same the tests try: enough for minutes, or with `TEST_PROFILE=deep` for hours."""

import os

PROFILE = os.environ.get("TEST_PROFILE", "default")
DEEP = PROFILE == "deep"
