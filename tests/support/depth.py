"""How much of the same the tests try: what fits into minutes, or with `TEST_PROFILE=deep` more."""

import os

PROFILE = os.environ.get("TEST_PROFILE", "default")
DEEP = PROFILE == "deep"
