"""A rule tried over kept samples: what fired, what would have, and what cannot be known."""

import time

import pytest
from memd_alerts.rules import RuleFile, load_rules
from memd_alerts.trial import KeptSample, Trial, TrialError, changed, kept_selectors

RECORD = "gpu:memd_direct_reclaim:ratio_rate5m"
STEP = 15


def rules(**changes):
    rule = {
        "name": "MemdX",
        "group": "memory",
        "severity": "ticket",
        "summary": "{value} on {gpu}",
        "by": ["gpu"],
        "expression": {"value": {"metric": "memd_x"}},
        "above": 10.0,
        "clear": 5.0,
        "for": 60,
        **changes,
    }
    records = [
        {
            "name": RECORD,
            "by": ["gpu"],
            "expression": {
                "ratio": {
                    "of": {"rate": {"metric": "memd_a_total", "over": 300}},
                    "to": {"rate": {"metric": "memd_b_total", "over": 300}},
                }
            },
        }
    ]
    return RuleFile.model_validate({"records": records, "rules": [rule]})


def tried(file, values, threshold=None, hold=None, name="memd_x", step=STEP):
    """Run over the values of one series, one every 15 s; None: no sample then."""
    rule = file.rules[0]
    trial = Trial(file, rule, threshold, hold)
    for number, value in enumerate(values):
        samples = [] if value is None else [KeptSample(name, {"gpu": "0", "x": "y"}, value)]
        trial.feed(number * step, samples)
    return trial


def lives(outcome):
    return [(each.fired_at, each.resolved_at) for each in outcome.firings]


def test_another_limit_fires_at_other_times_and_the_rule_as_it_is_beside_it():
    values = [0] * 4 + [12] * 8 + [0] * 4 + [8] * 8 + [0] * 4
    trial = tried(rules(), values, threshold=6.0)
    assert lives(trial.as_it_is) == [(120, 180)]
    assert lives(trial.as_tried) == [(120, 180), (300, 360)]
    (first, second) = trial.as_tried.firings
    assert first.labels == {"gpu": "0"}
    assert (first.since, first.peak, second.peak) == (60, 12, 8)
    assert first.threshold == 6.0
    assert trial.as_tried.rule.clear == 3.0, "the end moves along with the limit"
    assert trial.moments == len(values)
    assert trial.covered_seconds == (len(values) - 1) * STEP


def test_a_longer_hold_is_what_does_not_last():
    values = [0, *[12] * 8, 0]
    trial = tried(rules(), values, hold=300)
    assert len(trial.as_it_is.firings) == 1
    assert trial.as_tried.firings == []
    assert trial.as_tried.dropped == 1
    assert tried(rules(), values, hold=0).as_tried.firings[0].fired_at == 15


def test_what_fires_at_the_end_has_not_ended():
    (firing,) = tried(rules(), [12] * 20).as_it_is.firings
    assert firing.resolved_at is None


@pytest.mark.parametrize(
    ("sides", "threshold", "clear"),
    [
        ({"above": 10.0, "clear": 8.0}, 20.0, 16.0),
        ({"above": 10.0, "clear": 8.0}, -5.0, -5.0),  # never beyond the limit
        ({"above": None, "below": 10.0, "clear": 20.0}, 3.0, 6.0),
        ({"above": 0.0, "clear": None}, 3.0, None),
        ({"above": 0.0, "clear": -1.0}, 3.0, None),
    ],
)
def test_the_level_at_which_it_ends_keeps_its_proportion(sides, threshold, clear):
    rule = changed(rules(**sides).rules[0], threshold, None)
    assert rule.limit == threshold
    assert rule.clear == clear


def test_a_measured_limit_can_be_replaced_by_a_number():
    file = load_rules()
    rule = file.rule("MemdPoolPressure")
    assert rule is not None
    trial = changed(rule, 0.5, None)
    assert trial.limit == 0.5
    assert trial.clear == pytest.approx(0.475)


def test_a_record_stands_for_its_series_and_ends_when_there_is_nothing_to_divide():
    file = rules(expression={"record": {"name": RECORD}})
    trial = tried(file, [12] * 8 + [None] * 4 + [12] * 8, name=RECORD)
    assert lives(trial.as_it_is) == [(60, 120), (240, None)]
    assert trial.names == {RECORD}


def test_a_metric_that_is_kept_only_when_it_changes_is_carried():
    values = [12, *[None] * 16, 0]  # 255 s later
    assert lives(tried(rules(), values).as_it_is) == [(60, 255)]
    gone = tried(rules(), [12, *[None] * 30])
    assert lives(gone.as_it_is) == [(60, None)], "not known is not resolved"


def test_a_daemon_that_was_down_holds_no_condition():
    file, rule = rules(), rules().rules[0]
    trial = Trial(file, rule)
    for at in (0, 15, 30, 3000, 3015, 3030, 3060):
        trial.feed(at, [KeptSample("memd_x", {"gpu": "0"}, 12.0)])
    assert lives(trial.as_it_is) == [(3060, None)]
    assert trial.covered_seconds == 90


def test_a_rate_over_an_hour_costs_no_more_than_one_over_a_minute():
    """Each moment looks at the ends of a window, not at all that is in it: CPU time of a day."""

    def took(over):
        increase = {"increase": {"metric": "memd_a_total", "over": over}}
        file = rules(expression=increase, above=1e9, clear=None)
        trial = Trial(file, file.rules[0], 2e9)
        began = time.thread_time()
        for number in range(86400 // STEP):
            trial.feed(
                number * STEP,
                [KeptSample("memd_a_total", {"gpu": str(gpu)}, number) for gpu in range(4)],
            )
        return time.thread_time() - began

    assert min(took(3600) for _ in range(2)) < 2.5 * min(took(60) for _ in range(2))


def test_before_the_days_in_question_nothing_fires():
    file, rule = rules(), rules().rules[0]
    trial = Trial(file, rule)
    for number in range(10):
        sample = KeptSample("memd_x", {"gpu": "0"}, 12.0)
        trial.feed(number * STEP, [sample], evaluated=number >= 5)
    assert [each.since for each in trial.as_it_is.firings] == [75]


def test_what_cannot_be_tried_says_why():
    file = load_rules()
    down = file.rule("MemdDown")
    assert down is not None
    with pytest.raises(TrialError, match="by Prometheus only"):
        Trial(file, down)
    quantile = {"quantile": {"metric": "memd_h_seconds", "q": 0.9, "over": 300}}
    file = rules(expression=quantile)
    with pytest.raises(TrialError, match="histogram memd_h_seconds, of which no samples"):
        tried(file, [])
    assert kept_selectors(file) == []


def test_every_other_shipped_rule_can_be_tried():
    file = load_rules()
    kept = {selector.metric for selector in kept_selectors(file)}
    records = {record.name for record in file.records}
    for rule in file.rules:
        if not rule.prometheus_only:
            trial = Trial(file, rule, 1.0, 30)
            assert trial.names <= kept | records, rule.name
            trial.feed(0.0, [])
