"""The Grafana dashboard against what Grafana takes; no Grafana is needed.

By its documented JSON model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/
"""

import re
from itertools import combinations

import pytest

from memd.observe.grafana import WIDTH, dashboard

BOARD = dashboard()
PANELS = BOARD["panels"]
DRAWN = [panel for panel in PANELS if panel["type"] != "row"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Of @grafana/data's value formats, those that a dashboard like this one would use.
UNITS = {"none", "short", "percentunit", "s", "bytes", "Bps", "ops", "reqps", "celsius", "watt"}
BUILT_IN = {"__rate_interval", "__interval", "__range", "datasource"}
VARIABLES = {each["name"]: each for each in BOARD["templating"]["list"]}


def queries():
    for panel in DRAWN:
        yield from ((panel["title"], target["expr"], target) for target in panel["targets"])


def test_it_can_be_imported_again_and_again():
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", BOARD["uid"])
    assert BOARD["title"]
    assert BOARD["schemaVersion"] >= 36, "since then a data source is an object"
    assert "id" not in BOARD, "an id of another Grafana's database"
    assert "__inputs" not in BOARD, "provisioned dashboards are asked nothing"
    assert re.fullmatch(r"\d+[smh]", BOARD["refresh"])


def test_ids_of_panels_and_queries_are_unique():
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    assert min(ids) > 0
    for panel in DRAWN:
        names = [target["refId"] for target in panel["targets"]]
        assert names
        assert len(set(names)) == len(names), panel["title"]
    titles = [panel["title"] for panel in PANELS]
    assert all(titles)


def test_panels_lie_in_the_grid_and_do_not_overlap():
    for panel in PANELS:
        place = panel["gridPos"]
        assert all(isinstance(each, int) and each >= 0 for each in place.values())
        assert place["w"] > 0
        assert place["h"] > 0
        assert place["x"] + place["w"] <= WIDTH == 24, panel["title"]
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or apart, f"{one['title']} lies over {other['title']}"


@pytest.mark.parametrize("panel", DRAWN, ids=lambda panel: panel["title"])
def test_a_panel_is_of_a_kind_and_unit_that_grafana_has(panel):
    assert panel["type"] in {"stat", "timeseries", "heatmap"}
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["fieldConfig"]["overrides"] == []
    assert panel["description"], "no help"
    assert panel["datasource"] == SOURCE
    assert all(target["datasource"] == SOURCE for target in panel["targets"])
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": [{"value": None}]})[
        "steps"
    ]
    assert steps[0]["value"] is None, "the first step has no lower end"
    values = [step["value"] for step in steps[1:]]
    assert values == sorted(values)


def test_a_single_number_is_of_now_and_not_the_last_one_that_was_known():
    for panel in DRAWN:
        if panel["type"] == "stat":
            assert panel["options"]["graphMode"] == "none"
            assert all(
                (each["instant"], each["range"]) == (True, False) for each in panel["targets"]
            )


def test_the_state_has_a_colour_of_its_own():
    (panel,) = (panel for panel in DRAWN if panel["title"] == "State")
    colours = [step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
    assert colours == ["green", "orange", "red"]
    (target,) = panel["targets"]
    parts = target["expr"].split(" or ")
    assert [part[0] for part in parts] == ["0", "1", "2"]
    known = [re.search(r'state([=!~]+)"([^"]*)"', part).groups() for part in parts]
    assert known == [("=", "ready"), ("!~", "ready|failed"), ("=", "failed")]


def test_the_data_source_is_chosen_by_a_variable():
    assert next(iter(VARIABLES)) == "datasource", "others ask it for their values"
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for each in BOARD["annotations"]["list"]:
        assert each["datasource"] == SOURCE


def test_every_variable_is_declared_before_it_is_used_and_used():
    known, used = {"datasource"}, set()
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            asked = set(re.findall(r"\$(\w+)", variable["query"]["query"]))
            assert asked <= known, name
            assert variable["datasource"] == SOURCE
            assert variable["refresh"] in (1, 2), "never asked for otherwise"
            assert variable["multi"]
            assert variable["includeAll"]
        known.add(name)
    expressions = [expr for _, expr, _ in queries()]
    expressions += [each["expr"] for each in BOARD["annotations"]["list"]]
    for expr in expressions:
        names = set(re.findall(r"\$(\w+)", expr))
        assert names <= VARIABLES.keys() | BUILT_IN, expr
        used |= names
        for name in names & VARIABLES.keys():
            # Several values are a pattern, which = does not take.
            assert re.search(rf'=~"\${name}"', expr), expr
            assert f'="${name}"' not in expr, expr
    assert VARIABLES.keys() - {"datasource"} <= used


def test_a_legend_names_labels_that_the_query_keeps():
    seen = 0
    for title, expr, target in queries():
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            kept = re.findall(r"\bby \(([^)]*)\)", expr)
            there = {name.strip() for names in kept for name in names.split(",")}
            assert not kept or label in there, f"{title}: {label}"
            seen += 1
    assert seen > 20
