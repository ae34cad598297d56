"""Answers of the daemon as tables, figures and words."""

import time
from dataclasses import replace

import pytest
import recorded
from memd_dashboard import frame, markup
from memd_dashboard.scrape import parse
from memd_dashboard.snapshot import Reading, Snapshot
from memd_dashboard.view import (
    alerts,
    chart,
    gpus,
    jobs,
    overview,
    prefixes,
    requests,
    tenants,
    tiers,
    tuning,
)

PATHS = {
    "status": "/admin/v1/status",
    "pool": "/admin/v1/pool",
    "requests": "/admin/v1/requests",
    "settings": "/admin/v1/settings",
    "settings_history": "/admin/v1/settings/history",
    "events": "/admin/v1/events",
    "alerts": "/admin/v1/alerts",
    "prefixes": "/admin/v1/prefixes",
    "jobs": "/admin/v1/jobs",
    "tenants": "/admin/v1/tenants",
}


def test_what_the_sources_say_otherwise():
    diff = {
        "differences": {
            "memory.watermark.high": {
                "in_force": 0.85,
                "sources": 0.9,
                "source": "file",
                "after_restart": 0.9,
            }
        }
    }
    assert tuning.beside_sources(diff, {"memory.watermark.high": "share of one"}) == [
        {
            "setting": "memory.watermark.high",
            "in force": "85 %",
            "source says": "90 % (file)",
            "after a restart": "90 %",
        }
    ]
    assert tuning.beside_sources({}, {}) == []


@pytest.fixture
def snap():
    given = recorded.answers()
    now = time.time()
    readings = {topic: Reading(given[path], now) for topic, path in PATHS.items()}
    first = parse(given["/metrics"], now - 60)
    return Snapshot("http://memd", now, readings, (first, replace(first, at=now)), now, 0.1)


def test_the_pool_bar_shows_states_with_letters_and_both_marks(snap):
    pool = {
        "capacity_pages": 100,
        "active_pages": 20,
        "cached_pages": 30,
        "pinned_pages": 10,
        "quarantined_pages": 0,
        "free_pages": 40,
        "watermark_low": 0.7,
        "watermark_high": 0.9,
        "layout": {"page_bytes": 1024},
    }
    parts = overview.pool_parts(pool)
    assert [(part.letter, part.pages) for part in parts] == [
        ("A", 20),
        ("P", 10),
        ("C", 30),
        ("F", 40),
    ]
    assert sum(part.ratio for part in parts) == pytest.approx(1)
    drawn = overview.pool_bar(pool)
    assert "left:70.00%" in drawn
    assert "left:90.00%" in drawn
    assert "20.0 KiB · 20 %" in drawn
    assert overview.pool_parts({}) == []
    assert overview.pool_parts(snap.get("pool"))


def test_the_six_figures_are_unknown_and_not_zero_without_data(snap):
    assert [card.value for card in overview.numbers(replace(snap, scrapes=()))] == ["—"] * 6
    known = {card.name: card.value for card in overview.numbers(snap)}
    assert len(known) == 6
    assert known["Unreclaimable"].endswith("%")
    assert known["Generated"] == "0 tok/s"


def test_a_trend_of_a_counter_is_its_growth():
    series = {"labels": {}, "times": [0, 60, 120], "values": [10, 130, 70]}
    hour = {"hour": {"series": [series]}, "day_ago": {"series": []}}
    snap = Snapshot("", 0, {"memd_x_total": Reading(hour, 0), "memd_y": Reading(hour, 0)})
    assert overview.trend(snap, "memd_x_total") == [(60, 2.0)]  # then it restarted
    assert [value for _, value in overview.trend(snap, "memd_y")] == [10, 130, 70]
    assert overview.yesterday(snap, "memd_y") is None


def test_why_requests_wait_is_told_in_words():
    rows = [{"state": "waiting", "waiting_for": "capacity"}] * 2
    rows += [{"state": "waiting", "waiting_for": "prefix"}, {"state": "running"}]
    snap = Snapshot("", 0, {"requests": Reading({"requests": rows}, 0)})
    (first, second) = overview.waiting(snap)
    assert first[:2] == ("capacity", 2)
    assert "pool has too few pages" in first[2]
    assert second[:2] == ("prefix", 1)


def test_what_changed_mixes_settings_and_events_newest_first():
    history = [
        {"revision": 1, "time": 50.0, "kind": "start", "changes": {}},
        {
            "revision": 2,
            "time": 90.0,
            "kind": "change",
            "who": "ann",
            "reason": "peaks",
            "changes": {"memory.watermark.high": {"old": 0.9, "new": 0.8}},
        },
    ]
    events = [{"time": 95.0, "kind": "daemon_start", "message": "memd starts"}]
    live = {"live": {"memory.watermark.high": {"unit": "share of one"}}}
    readings = {
        "settings": Reading(live, 0),
        "settings_history": Reading({"history": history}, 0),
        "events": Reading({"events": events}, 0),
    }
    rows = overview.changes(Snapshot("", 100.0, readings))
    assert [row.text for row in rows] == [
        "memd starts",
        "memory.watermark.high: 90 % → 80 %, by ann: peaks",
    ]


def test_the_strip_tells_state_time_and_revision_and_when_it_is_old(snap):
    fresh = frame.strip(snap, None)
    assert "ready" in fresh
    assert "revision <b>1</b>" in fresh
    assert "Unreachable" not in fresh
    old = replace(snap, silent_seconds=9.0, unreachable_since=snap.now - 9, problem="<refused>")
    text = frame.strip(old, None)
    assert "Unreachable since" in text
    assert "Last values below" in text
    assert "&lt;refused&gt;" in text
    assert "<refused>" not in text
    assert old.read_only == "The daemon does not answer."


def test_a_key_without_admin_write_may_only_look(snap):
    status = {**snap.get("status"), "caller": {"name": "eve", "scopes": ["admin:read"]}}
    looking = replace(snap, readings={**snap.readings, "status": Reading(status, snap.now)})
    assert "admin:write" in (looking.read_only or "")
    assert snap.read_only is None


def test_the_table_of_requests_is_oldest_first_and_filters(snap):
    rows = snap.rows("requests", "requests")
    table = requests.table(rows)
    ages = {row["id"]: row["age_seconds"] for row in rows}
    assert [ages[row["id"]] for row in table] == sorted(ages.values(), reverse=True)
    assert requests.filtered(rows, rows[0]["id"].upper(), []) == [rows[0]]
    assert requests.filtered(rows, "", ["waiting"]) == []
    assert requests.state_text({"state": "waiting", "waiting_for": "prefix"}) == "waiting (prefix)"


@pytest.mark.parametrize(
    ("row", "phases"),
    [
        ({"age_seconds": 3.0, "queue_seconds": None}, [("queued", 0, 3)]),
        ({"age_seconds": 3.0, "queue_seconds": 1.0}, [("queued", 0, 1), ("prefill", 1, 3)]),
        (
            {
                "duration_seconds": 4.0,
                "queue_seconds": 1.0,
                "time_to_first_token_seconds": 2.0,
                "generated_tokens": 8,
            },
            [("queued", 0, 1), ("prefill", 1, 2), ("decode", 2, 4)],
        ),
    ],
)
def test_the_timeline_covers_a_request_without_gaps(row, phases):
    spans = requests.phases(row)
    assert [(span["phase"], span["start"], span["end"]) for span in spans] == phases
    assert requests.gantt(spans).to_dict()["layer"]


def test_percentiles_group_finished_requests():
    rows = [
        {"tenant": "a", "outcome": "ok", "duration_seconds": 1.0, "generated_tokens": 5},
        {"tenant": "a", "outcome": "error", "duration_seconds": 3.0},
        {"tenant": "", "outcome": "ok"},
    ]
    first, second = requests.percentiles(rows, "tenant")
    assert (first["tenant"], first["requests"], first["bad"]) == ("a", 2, "50 %")
    assert first["duration p95"] == "2.9 s"
    assert (second["tenant"], second["duration p95"]) == ("none", "—")


def test_settings_are_told_with_source_and_bounds(snap):
    rows = {row["setting"]: row for row in tuning.rows(snap.get("settings"), snap.now)}
    high = rows["memory.watermark.high"]
    assert (high["value"], high["allowed"], high["source"]) == ("90 %", "0 % to 100 %", "default")
    live = {"source": "live", "who": "ann", "revision": 4}
    assert tuning.source(live) == "live: ann, revision 4"
    assert "tenants" not in tuning.editable(snap.get("settings"))
    allowed = {name: row["allowed"] for name, row in rows.items()}
    assert allowed["engine.max_batch_tokens"] == "auto or at least 16"
    assert tuning.allowed({"type": "string", "unit": "bytes"}) == "such as 80% or 24GB"
    assert allowed["engine.reserve_tokens"] == "0 or more"
    assert allowed["memory.host.limit"] == "auto or a size, such as 24GB"
    assert allowed["memory.watermark.high"] == "0 % to 100 %"


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"value": 0.85, "unit": "share of one"}, "85%"),
        ({"value": 16 * 2**20, "unit": "bytes"}, "16MiB"),
        ({"value": 1000, "unit": "bytes"}, "1000B"),
        ({"value": 2.5, "unit": "seconds"}, "2.5s"),
        ({"value": "auto", "unit": "tokens"}, "auto"),
        ({"value": 5, "unit": "steps"}, "5"),
    ],
)
def test_an_edit_starts_from_what_the_daemon_would_take(entry, text):
    assert tuning.typed(entry) == text


def test_what_was_typed_becomes_a_value():
    assert [tuning.parse(text) for text in ("5", " 85% ", "none", "auto")] == [
        5,
        "85%",
        None,
        "auto",
    ]


def test_a_preview_says_what_happens_at_once():
    units = {"memory.watermark.high": "share of one"}
    answer = {
        "valid": True,
        "changes": {"memory.watermark.high": {"old": 0.9, "new": 0.5}},
        "effect": {
            "occupied_ratio": 0.8,
            "occupied_ratio_after": 0.4,
            "reclaimed_pages": 312,
            "reclaim_seconds": 0.9,
        },
        "predicted": None,
        "predicted_reason": "there is no simulator",
    }
    first, second, third = tuning.effect(answer, 16384, units)
    assert first == "memory.watermark.high: 90 % → 50 %"
    assert "312 cached pages (4.9 MiB)" in second
    assert "80 % to 40 %" in second
    assert "900 ms" in second
    assert "there is no simulator" in third
    assert tuning.effect({"changes": {}}, 1, units)[0].startswith("Nothing would change")


def test_only_changes_in_effect_can_be_undone():
    history = [
        {"revision": 2, "kind": "change", "state": "taken back", "changes": {"a": {}}},
        {"revision": 3, "kind": "change", "state": "in force", "changes": {"a": {}}},
        {"revision": 4, "kind": "undo", "state": None, "undoes": 2, "changes": {"a": {}}},
    ]
    assert [row["revision"] for row in tuning.undoable(history)] == [3]
    assert [row["kind"] for row in tuning.audit(history, None, {})] == [
        "undo of 2",
        "change",
        "change",
    ]


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("seconds", "8.2 s"),
        ("ratio", "825 %"),
        ("bytes", "8 B"),
        ("per_second", "8.25 a second"),
        ("number", "8.25"),
        (None, "8.25"),
    ],
)
def test_what_an_alert_looks_at_has_a_unit(unit, text):
    assert alerts.figure(8.25, unit) == text
    assert alerts.figure(None, unit) == "—"
    row = {"name": "R", "state": "firing", "since": 0, "unit": unit, "value": 8.25}
    assert f"Now {text}, limit —" in alerts.line(row, 60.0)


def test_an_alert_that_ended_says_when():
    row = {"state": "resolved", "since": 0, "fired_at": 10, "resolved_at": 40}
    assert alerts.state_text(row, 100.0) == "resolved 1 min ago"
    assert alerts.state_text({**row, "state": "firing"}, 70.0) == "firing for 1 min"


def test_six_cards_are_a_row_and_more_fill_two():
    card = markup.Card("Blocks", "10,000 of 10,000")
    assert "many" not in markup.cards([card] * 6)
    assert "many" in markup.cards([card] * 7)
    assert "value long" in markup.cards([card])


def test_small_numbers_on_an_axis_are_no_millions():
    axis = chart.value_axis("tokens").to_dict()
    assert "abs(datum.value) < 1" in axis["labelExpr"]


def test_alerts_are_ordered_and_a_runbook_links_only_to_an_address(snap):
    rows = [
        {"name": "B", "state": "pending", "labels": {}},
        {"name": "A", "state": "firing", "silenced": True, "labels": {}},
        {"name": "C", "state": "firing", "labels": {"alertname": "C", "tenant": "x"}},
    ]
    assert [row["name"] for row in alerts.ordered(rows)] == ["C", "A", "B"]
    assert [row["name"] for row in alerts.firing(rows)] == ["C"]
    assert alerts.title(rows[2]) == "C (tenant=x)"
    assert "<a href" not in alerts.runbook({"runbook_url": "javascript:alert(1)"})
    assert "<a href" in alerts.runbook({"runbook_url": "https://h/x.md"})
    for row in snap.rows("alerts", "alerts"):
        assert row["name"] in alerts.line(row, snap.now)
        assert alerts.matchers(row)["alertname"] == row["name"]


def test_a_rule_shows_the_value_nearest_to_its_limit():
    values = [{"value": 1.0, "threshold": 5}, {"value": 4.0, "threshold": 5}]
    above, below = (
        alerts.rules([{"name": "R", "direction": each, "values": values}])[0]
        for each in ("above", "below")
    )
    assert (above["now"], above["limit"]) == ("4", "> 5")
    assert (below["now"], below["limit"]) == ("1", "< 5")
    assert alerts.rules([{"name": "R", "values": []}])[0]["now"] == "—"
    idle = {"labels": {}, "value": 90.0, "threshold": 60.0, "met": False}
    stalled = {"name": "R", "unit": "seconds", "direction": "above", "values": [idle]}
    (row,) = alerts.rules([stalled])
    assert row["limit"] == f"> {alerts.figure(60.0, 'seconds')}, but another condition is not met"
    (row,) = alerts.rules([stalled | {"values": [idle | {"met": True}]}])
    assert row["limit"].endswith(alerts.figure(60.0, "seconds"))


def test_prefixes_stand_beside_their_branches_without_overlap(snap):
    rows = [
        {"id": "root", "parent_id": None, "start_token": 0, "tokens": 100, "holders": 2},
        {"id": "x", "parent_id": "root", "start_token": 100, "tokens": 50},
        {"id": "y", "parent_id": "root", "start_token": 100, "tokens": 40},
        {"id": "z", "parent_id": "gone", "start_token": 7, "tokens": 9},
    ]
    spans = {span["id"]: span for span in prefixes.layout(rows, 48)}
    assert (spans["root"]["lane"], spans["root"]["below"]) == (0, 2)
    assert {spans["x"]["lane"], spans["y"]["lane"]} == {0, 1}
    assert spans["z"]["lane"] == 2
    assert prefixes.icicle(snap.rows("prefixes", "prefixes")).to_dict()["encoding"]
    many = [{"id": str(n), "start_token": 0, "tokens": n} for n in range(200)]
    assert max(span["below"] for span in prefixes.layout(many, 48)) <= 48


def test_a_pin_says_how_long_it_lasts():
    assert prefixes.pin_text({"pinned": False}, 0) == ""
    assert prefixes.pin_text({"pinned": True, "pinned_until": None}, 0) == "until unpinned"
    text = prefixes.pin_text({"pinned": True, "pinned_until": 100, "pin_label": "chat"}, 40)
    assert text == "for 1 min (chat)"


def test_an_explanation_names_tier_place_and_reason():
    answer = {
        "prompt_tokens": 100,
        "hit_tokens": {"device": 48, "host": 16},
        "computed_tokens": 36,
        "first_missing_token": 64,
        "reason": "evicted",
        "evicted_age_seconds": 12.0,
        "nearest": {"id": "ab", "tokens": 64},
    }
    rows = dict(prefixes.explained(answer))
    assert rows["Would be found"] == "48 on the device, 16 on the host"
    assert rows["Because"] == "What follows was cached, and was evicted."
    assert rows["Evicted"] == "12 s ago"


def test_tenants_show_shares_of_memory_and_of_tokens():
    rows = [
        {"name": "a", "used_bytes": 300, "quota_bytes": 400, "computed_tokens": 10},
        {"name": "", "used_bytes": 100, "quota_bytes": None, "computed_tokens": 30},
    ]
    first, second = tenants.table(rows)
    assert (first["tenant"], first["of its quota"], first["of memory"]) == ("a", "75 %", "75 %")
    assert (second["tenant"], second["quota"], second["of tokens"]) == (
        "no tenant",
        "no limit",
        "75 %",
    )
    assert len(tenants.fairness(rows)) == 4


def test_a_board_shows_only_what_nvml_tells():
    board = {
        "gpu": "0",
        "name": "H200",
        "memory": {"total_bytes": 2**37, "by_owner_bytes": {"pool": 2**36, "weights": None}},
        "utilization_ratio": None,
        "temperature_celsius": {"core": 41, "memory": None},
        "power_watts": 233.4,
        "throttled_by": [],
        "ecc_errors": None,
    }
    assert [card.name for card in gpus.cards(board)] == [
        "Memory",
        "Temperature",
        "Power",
        "Throttled",
    ]
    assert [part[0] for part in gpus.memory(board)] == ["KV pages of this daemon"]
    assert gpus.details(board) == []


def test_jobs_and_tiers_read_what_was_recorded(snap):
    rows = jobs.table(snap.rows("jobs", "jobs"), snap.now)
    assert {"sampling", "alert_evaluation", "retention", "idle_audit"} <= {
        row["job"] for row in rows
    }
    assert jobs.next_run({"next_run_at": None}, 0) == "—"
    assert jobs.next_run({"next_run_at": 5}, 9) == "due"
    assert [card.name for card in tiers.cards(snap.get("pool"), snap.window())][:2] == [
        "Device",
        "Host",
    ]
    assert {bar.name for bar in tiers.evictions(snap.window())} >= {"watermark", "allocation"}


def test_a_change_shows_what_was_before_and_after_it():
    row = {"revision": 2, "kind": "change", "changes": {}, "measured": None}
    (shown,) = tuning.audit([row], None, {})
    assert shown["first token"] == shown["occupied"] == "—"
    before = {"time_to_first_token_p95_seconds": 1.25, "occupied_ratio": 0.9}
    row["measured"] = {"before": before, "after": {"time_to_first_token_p95_seconds": 0.5}}
    (shown,) = tuning.audit([row], None, {})
    assert shown["first token"] == "1.2 s → 500 ms"
    assert shown["occupied"] == "90 % → —"
    assert shown["between tokens"] == "—"
    row["measured"]["after"] = None
    assert tuning.audit([row], None, {})[0]["first token"] == "1.2 s → —"


def test_what_a_request_missed_is_told_with_the_reason():
    card = dict(requests.card({"cached_tokens": 0, "missed": None}, 1))
    assert card["Not found"] == "none but the last, which is always computed"
    assert dict(requests.card({"cached_tokens": None}, 1))["Not found"] == "—"
    missed = {"tokens": 1200, "evicted_tokens": 0, "first_token": 48, "reason": "differs"}
    assert dict(requests.card({"cached_tokens": 48, "missed": missed}, 1))["Not found"] == (
        "1,200 tokens, from token 48 on: cached prompts go on differently from there"
    )
    rows = [
        {"request_id": "a", "missed_tokens": 10, "miss_reason": "evicted"},
        {"request_id": "b", "missed_tokens": 0, "miss_reason": None},
        {"request_id": "c", "missed_tokens": 30, "miss_reason": "unseen"},
        {"request_id": "d", "missed_tokens": None, "miss_reason": None},
    ]
    shown = prefixes.missed_requests(rows, None)
    assert [row["request"] for row in shown] == ["c", "a"]
    assert shown[1]["why"] == "it was there, and had been evicted"


def test_misses_over_time_are_the_growth_of_counters():
    series = [
        {"labels": {"reason": "cold"}, "times": [0, 60, 120], "values": [5, 25, 10]},
        {"labels": {"reason": "final"}, "times": [60], "values": [5]},
    ]
    rows = prefixes.miss_history({"hour": {"series": series}}, None)
    assert [(row["at"], row["reason"], row["tokens"]) for row in rows] == [
        (60_000, "cold", 20),
        (120_000, "cold", 10),  # the engine was restarted
    ]
    assert prefixes.miss_chart(rows).to_dict()
    assert prefixes.miss_history({}, None) == []
