"""The life of an alert: pending, firing, resolved; and what is not known."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memd_alerts.evaluate import GAP_SECONDS, LOST_SECONDS, RESOLVED_SECONDS, evaluate, format_value
from memd_alerts.history import History, Points
from memd_alerts.rules import RuleFile
from memd_alerts.state import State
from memd_alerts.values import Values
from scrapes import Sample, scrape

EVERY = 15.0
RULE = {
    "name": "MemdHot",
    "group": "g",
    "severity": "page",
    "summary": "it is {value}",
    "expression": {"value": {"metric": "heat"}},
    "above": 10.0,
    "clear": 5.0,
    "for": 60,
}


class Watch:
    """Evaluates one rule again and again."""

    def __init__(self, *rules, **changes):
        rules = rules or ({**RULE, **changes},)
        self.rules = RuleFile.model_validate({"rules": rules})
        self.history = History(self.rules)
        self.state = State()
        self.now = 1_000_000.0
        self.kinds = []

    def see(self, *samples, after=EVERY):
        self.now += after
        self.history.add(self.now, samples)
        self.state, changes = evaluate(
            self.rules, self.history, self.state, self.now, {"instance": "a:1"}
        )
        self.kinds += [change.kind for change in changes]
        return [change.kind for change in changes]

    def heat(self, *values, after=EVERY):
        return [kind for value in values for kind in self.see(*scrape(heat=value), after=after)]

    @property
    def alert(self):
        (alert,) = self.state.alerts
        return alert


def test_an_alert_is_pending_then_fires_then_is_resolved():
    watch = Watch()
    assert watch.heat(3) == []
    assert watch.heat(11) == ["pending"]
    began = watch.now
    assert watch.heat(12, 14, 13) == []
    assert watch.heat(11) == ["firing"]
    assert watch.alert.labels == {"alertname": "MemdHot", "severity": "page", "instance": "a:1"}
    assert (watch.alert.since, watch.alert.fired_at) == (began, watch.now)
    assert (watch.alert.value, watch.alert.threshold, watch.alert.peak) == (11, 10, 14)
    assert watch.heat(4) == ["resolved"]
    assert watch.alert.resolved_at == watch.now
    assert watch.alert.summary == "it is 4"
    assert watch.alert.peak == 14


def test_an_alert_that_does_not_hold_long_enough_never_fires():
    watch = Watch()
    assert watch.heat(11, 11, 11, 9) == ["pending", "dropped"]
    assert watch.state.alerts == []
    assert watch.heat(11, 11, 11) == ["pending"]


def test_a_firing_alert_lasts_until_its_clear_level():
    watch = Watch(**{"for": 0})
    assert watch.heat(11) == ["firing"]
    assert watch.heat(9, 7, 5.1, 11, 6) == []
    assert watch.heat(5) == ["resolved"]
    assert watch.heat(9) == []  # below the limit: it does not come back at the clear level
    assert watch.heat(10.1) == ["firing"]


def test_without_a_clear_level_the_limit_is_it():
    watch = Watch(clear=None, **{"for": 0})
    assert watch.heat(11, 10) == ["firing", "resolved"]


def test_below_is_the_other_way_round():
    watch = Watch(above=None, below=2.0, clear=4.0, **{"for": 0})
    assert watch.heat(3, 1, 0.5, 3) == ["firing"]
    assert watch.alert.peak == 0.5
    assert watch.heat(4) == ["resolved"]


@pytest.mark.parametrize("samples", [(), (Sample("heat", {}, math.nan),), (Sample("x", {}, 1),)])
def test_what_is_not_known_is_not_resolved(samples):
    watch = Watch(**{"for": 0})
    watch.heat(11)
    known_at = watch.now
    for _ in range(20):
        assert watch.see(*samples) == []
    assert watch.alert.state == "firing"
    assert watch.alert.known_at == known_at
    assert watch.heat(4) == ["resolved"]
    assert not watch.alert.lost


def test_after_an_hour_without_data_an_alert_is_given_up():
    watch = Watch(**{"for": 0})
    watch.heat(11)
    kinds = [kind for _ in range(int(LOST_SECONDS // EVERY)) for kind in watch.see()]
    assert kinds == []
    assert watch.see() == ["resolved"]
    assert watch.alert.lost


def test_a_pending_alert_needs_data_all_the_time():
    watch = Watch()
    assert watch.heat(11, 11) == ["pending"]
    assert watch.see() == ["dropped"]
    assert watch.heat(11, 11, 11, 11) == ["pending"]
    assert watch.heat(11) == ["firing"]


def test_a_pending_alert_begins_anew_after_a_gap():
    watch = Watch()
    watch.heat(11, 11)
    assert watch.heat(11, after=GAP_SECONDS + 1) == []
    assert watch.alert.state == "pending"
    assert watch.alert.since == watch.now
    assert watch.heat(11, 11, 11) == []
    assert watch.heat(11) == ["firing"]


def test_a_daemon_that_was_down_for_hours_gives_a_firing_alert_time_to_be_seen():
    watch = Watch(**{"for": 0})
    watch.heat(11)
    watch.history = History(watch.rules)
    assert watch.see(after=3 * LOST_SECONDS) == []
    assert watch.alert.state == "firing"
    assert watch.heat(11) == []
    assert watch.kinds == ["firing"]


def test_a_clock_that_is_set_back_ends_nothing():
    watch = Watch(**{"for": 0})
    watch.heat(11)
    assert watch.heat(11, after=-7200.0) == []
    assert watch.alert.state == "firing"


def test_a_resolved_alert_is_shown_for_a_while():
    watch = Watch(**{"for": 0})
    watch.heat(11, 1)
    watch.heat(*[1] * int(RESOLVED_SECONDS // EVERY))
    assert watch.alert.state == "resolved"
    watch.heat(1)
    assert watch.state.alerts == []


def test_each_life_of_an_alert_has_an_id_of_its_own():
    watch = Watch(**{"for": 0})
    ids = set()
    for _ in range(3):
        watch.heat(11)
        ids.add(watch.alert.id)
        watch.heat(12, 1)
        ids.add(watch.alert.id)
    assert len(ids) == 3


def test_alerts_of_one_rule_are_told_apart_by_its_labels():
    watch = Watch(by=["gpu"], **{"for": 0})
    hot = [Sample("heat", {"gpu": "0", "x": x}, 6.0) for x in "ab"]
    cold = Sample("heat", {"gpu": "1"}, 4.0)
    assert watch.see(*hot, cold) == ["firing"]
    assert watch.alert.labels["gpu"] == "0"
    assert watch.alert.value == 12.0  # summed over what `by` leaves out
    assert watch.see(*hot, Sample("heat", {"gpu": "1"}, 11.0)) == ["firing"]
    assert len(watch.state.alerts) == 2


def test_a_rule_that_is_gone_ends_its_alerts_after_an_hour():
    watch = Watch(**{"for": 0})
    watch.heat(11)
    watch.rules = RuleFile(rules=())
    assert watch.heat(11) == []
    kinds = [kind for _ in range(241) for kind in watch.heat(11)]
    assert kinds == ["resolved"]


GUARDED = {**RULE, "for": 0, "while": [{"expression": {"value": {"metric": "busy"}}, "above": 0}]}


def test_a_guard_must_hold_and_be_known():
    watch = Watch(GUARDED)
    assert watch.see(*scrape(heat=11, busy=0)) == []
    assert watch.see(*scrape(heat=11)) == []
    assert watch.see(*scrape(heat=11, busy=1)) == ["firing"]
    assert watch.see(*scrape(heat=11)) == []  # not known: it goes on
    assert watch.see(*scrape(heat=11, busy=0)) == ["resolved"]


def test_nothing_divided_by_nothing_is_no_alert_and_ends_one():
    rule = {**RULE, "for": 0, "above": 0.5, "clear": None}
    rule["expression"] = {
        "ratio": {"of": {"value": {"metric": "bad"}}, "to": {"value": {"metric": "all"}}}
    }
    watch = Watch(rule)
    assert watch.see(*scrape(bad=0, all=0)) == []
    assert watch.see(*scrape(bad=3, all=4)) == ["firing"]
    assert watch.see(*scrape(bad=0, all=0)) == ["resolved"]
    assert watch.alert.value is None
    assert watch.see(*scrape(bad=1, all=0)) == ["firing"]


def growth(form, values, over=60, every=EVERY):
    watch = Watch({**RULE, "expression": {form: {"metric": "n", "over": over}}})
    for value in values:
        watch.now += every
        watch.history.add(watch.now, scrape(n=value))
    values = Values(watch.rules, watch.history, watch.now)
    return values.vector(watch.rules.rules[0].expression, ())


def test_a_counter_that_begins_anew_counts_from_0():
    steady = growth("increase", [100, 110, 120, 130, 140])[()]
    assert steady == pytest.approx(40.0)
    assert growth("rate", [100, 110, 120, 130, 140])[()] == pytest.approx(40.0 / 60)
    anew = growth("increase", [10_000, 10_010, 5, 15, 25])[()]
    assert anew == pytest.approx(35.0)
    assert growth("increase", [10_000, 0, 0, 0, 0])[()] == 0.0


def test_one_sample_tells_no_rate():
    assert growth("rate", [100]) == {}


def test_a_quantile_is_interpolated_in_its_bucket():
    watch = Watch({**RULE, "expression": {"quantile": {"metric": "t", "q": 0.5, "over": 60}}})
    for count in (0, 10):
        watch.now += EVERY
        buckets = {"1": 0, "2": count, "+Inf": count}
        watch.history.add(
            watch.now, [Sample("t_bucket", {"le": le}, n) for le, n in buckets.items()]
        )
    values = Values(watch.rules, watch.history, watch.now)
    assert values.vector(watch.rules.rules[0].expression, ()) == {(): 1.5}


def test_history_keeps_what_rules_need_and_no_longer():
    watch = Watch({**RULE, "expression": {"rate": {"metric": "n", "over": 60}}})
    for _ in range(1000):
        watch.now += EVERY
        watch.history.add(watch.now, scrape(n=1, other=2))
    assert watch.history.names == {"n"}
    ((_, growth),) = watch.history.growth("n", watch.now, 1e9)
    assert growth.samples == 5
    assert list(watch.history.growth("other", watch.now, 1e9)) == []


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 50) | st.just(0)), min_size=1, max_size=60
    ),
    st.integers(1, 400),
)
def test_growth_over_any_window_is_what_its_samples_add_up_to(steps, seconds):
    points, samples, at = Points(), [], 0
    for after, value in steps:
        at += after
        samples.append((at, value))
        points.add(at, value)
        while samples[0][0] < at - 300:
            samples.pop(0)
        points.forget(at - 300)
    inside = [pair for pair in samples if pair[0] >= at - seconds]
    growth = points.growth(at - seconds, at)
    assert (growth.samples, growth.first_at, growth.last_at) == (len(inside), inside[0][0], at)
    began_anew = sum(max(0, v - w) and v for (_, v), (_, w) in pairwise(inside))
    assert growth.grown == inside[-1][1] - inside[0][1] + began_anew
    assert points.growth(at + 1, at + 9) is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ratio", "unknown"),
        (0.125, "ratio", "12.5%"),
        (3.2, "seconds", "3.2 s"),
        (600, "seconds", "10 min"),
        (3 * 2**30, "bytes", "3 GiB"),
        (7, "number", "7"),
    ],
)
def test_values_are_written_for_people(value, unit, text):
    assert format_value(value, unit) == text
