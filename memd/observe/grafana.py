"""The Grafana dashboard: `python -m memd.observe.grafana > deploy/grafana/memd.json`."""

import json
import re
import string
import sys
from typing import Any

from memd.observe.expressions import increase
from memd.observe.panel import Panel, Row
from memd.observe.panels_memory import ELASTIC, EVICTION, PACKING, POOL, SHARING
from memd.observe.panels_serving import DAEMON, GLANCE, GPUS, LATENCY, REQUESTS
from memd.observe.registry import family_of

ROWS = (GLANCE, POOL, ELASTIC, PACKING, EVICTION, SHARING, LATENCY, REQUESTS, GPUS, DAEMON)
WIDTH = 24  # of Grafana's grid
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """All of it, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        top = _add(row, top, panels)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "memd",
        "uid": "memd",
        "tags": ["memd"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "annotations": {"list": _annotations()},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _add(row: Row, top: int, panels: list[dict[str, Any]]) -> int:
    """Lay a row out below `top`; returns where the next one begins."""
    panels.append(
        {
            "type": "row",
            "title": row.title,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
            "collapsed": False,
            "panels": [],
        }
    )
    top += 1
    width = WIDTH // row.columns
    for first in range(0, len(row.panels), row.columns):
        line = row.panels[first : first + row.columns]
        height = max(HEIGHTS[panel.kind] for panel in line)
        for column, panel in enumerate(line):
            place = {"h": height, "w": width, "x": column * width, "y": top}
            panels.append({**_panel(panel), "gridPos": place})
        top += height
    return top


_HOW: dict[str, dict[str, Any]] = {
    # As it is now: of a range, the last value would stand there long after the daemon has gone.
    "stat": {"instant": True, "range": False},
    "timeseries": {},
    "heatmap": {"format": "heatmap"},
}


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}}
        options["tooltip"] = {"mode": "multi", "sort": "desc"}
    if panel.stacked:
        defaults["custom"] |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
        options["graphMode"] = "none"
        options["textMode"] = "name" if panel.unit == "none" else "auto"
        defaults["thresholds"] = _thresholds(panel)
    if panel.kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": panel.unit}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help or _meaning(panel),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": name,
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                **_HOW[panel.kind],
            }
            for name, query in zip(string.ascii_uppercase, panel.queries, strict=False)
        ],
    }


def _meaning(panel: Panel) -> str:
    """What its metrics are, in the registry's words."""
    names = [name for each in panel.queries for name in re.findall(r"memd_\w+", each.expression)]
    helps = [family.help for name in names if (family := family_of(name)) is not None]
    return "; ".join(dict.fromkeys(helps))


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warn is not None and panel.warn != panel.bad:
        steps.append({"color": "orange", "value": panel.warn})
    if panel.bad is not None:
        steps.append({"color": "red", "value": panel.bad})
    return {"mode": "absolute", "steps": steps}


def _annotations() -> list[dict[str, Any]]:
    changed = increase("memd_setting_changes_total", by="key, source", outcome="applied")
    restarted = increase("memd_engine_restarts_total", by="reason")
    started = 'changes(process_start_time_seconds{instance=~"$instance"}[$__rate_interval])'
    return [
        {
            "name": name,
            "enable": True,
            "datasource": _SOURCE,
            "expr": f"{expression} > 0",
            "titleFormat": title,
            "iconColor": colour,
        }
        for name, expression, title, colour in (
            ("Setting changes", changed, "{{key}} by {{source}}", "blue"),
            ("Engine restarts", restarted, "engine restarted: {{reason}}", "red"),
            ("Daemon starts", started, "{{instance}} started", "red"),
        )
    ]


def _variables() -> list[dict[str, Any]]:
    source: dict[str, Any] = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    chosen = (
        ("instance", "Instance", "label_values(memd_build_info, instance)"),
        (
            "gpu",
            "GPU",
            'label_values(memd_pool_allocations_total{instance=~"$instance"}, gpu)',
        ),
        (
            "model",
            "Model",
            'label_values(memd_generated_tokens_total{instance=~"$instance"}, model)',
        ),
    )
    return [
        source,
        *(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": query, "refId": name},
                "includeAll": True,
                "multi": True,
                "refresh": 2,
                "current": {"text": ["All"], "value": ["$__all"]},
            }
            for name, label, query in chosen
        ),
    ]


def dashboard_json() -> str:
    """The dashboard as text."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(dashboard_json())
