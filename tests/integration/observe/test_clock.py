"""The wall clock jumps while requests run."""

import itertools
import time

import pytest
from http_stand import Stand, byte_tokenizer, say

from memd.config import build

HOUR = 3600.0


@pytest.mark.parametrize("jump_seconds", [-HOUR, HOUR])
def test_c118_a_step_of_the_wall_clock_makes_no_long_and_no_negative_time(
    tmp_path, monkeypatch, jump_seconds
):
    true_time, jumps = time.time, itertools.cycle((0.0, jump_seconds))
    with Stand(tmp_path, build({}), byte_tokenizer(), 200, 64, True) as stand:
        stand.engine.script = say("Hello there!", pause=0.01)
        monkeypatch.setattr(time, "time", lambda: true_time() + next(jumps))
        for _ in range(3):
            assert stand.complete(max_tokens=20).status_code == 200
        monkeypatch.undo()
        assert stand.http.get("/metrics").status_code == 200
        samples = stand.service.metrics.samples()
    sums = {
        each.name: each.value
        for each in samples
        if each.name.startswith("memd_") and each.name.endswith("_seconds_sum")
    }
    assert sums["memd_time_to_first_token_seconds_sum"] > 0
    assert all(0 <= total < 60 for total in sums.values())
