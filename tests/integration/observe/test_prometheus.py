"""A real Prometheus scrapes a real daemon under load, and beside it a scripted GPU."""

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import pytest
from every_metric import every_metric
from memd_alerts.promql import measured
from memd_alerts.rules import RULES_FILE, load_rules
from prometheus_server import Prometheus, needs_prometheus, scraping
from served import Daemon, serving
from tiny import write_model

from memd.observe.grafana import dashboard, dashboard_json
from memd.observe.metrics import Metrics
from memd.observe.registry import FAMILIES, family_of

pytestmark = [needs_prometheus, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "memd.rules.yml"
SETTINGS = (
    "memory.limit=1024 tokens",
    "memory.host.limit=64KB",
    "history.sample_every=1s",
    "alerts.evaluate_every=1s",
)
TENANTS = json.dumps([{"name": "acme", "quota": "50%"}])
VARIABLES = {
    "$__rate_interval": "8s",
    '"$instance"': '".*"',
    '"$gpu"': '".*"',
    '"$model"': '".*"',
}
LOAD_SECONDS = 12


@dataclass
class Stand:
    """What runs."""

    daemon: Daemon
    prometheus: Prometheus
    first_scrape_at: float
    loaded_at: float  # when the load has ended: seconds pass before a test asks, where others run
    gpu: Metrics


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A daemon that has been under load, scraped from its start; the load is over."""
    directory = tmp_path_factory.mktemp("prometheus")
    channels = directory / "channels.yml"
    channels.write_text("hook: json://127.0.0.1:9/\n")
    state = directory / "state"
    state.mkdir()
    model = str(write_model(directory / "tiny"))
    settings = (*SETTINGS, f"tenants={TENANTS}", f"alerts.channels={channels}")
    gpu = every_metric()
    with (
        serving(state, model, *settings) as daemon,
        _rendering(gpu) as gpu_url,
        scraping(
            directory / "prometheus", daemon.url, [RULES], others={"scripted": gpu_url}
        ) as prometheus,
    ):
        prometheus.wait_until(
            lambda: len(prometheus.query("up == 1")) == 2, 60, "both targets have been scraped"
        )
        (series,) = prometheus.query('up{job="memd"}[5m]')
        _load(daemon)
        yield Stand(daemon, prometheus, float(series["values"][0][0]), time.time(), gpu)
    asyncio.run(gpu.gpu.stop())


class _Renderer(BaseHTTPRequestHandler):
    metrics: Metrics

    def do_GET(self) -> None:
        body, content_type = self.metrics.render(self.headers.get("accept", ""))
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _rendering:
    """Serves metrics without a daemon; gives the address."""

    def __init__(self, metrics: Metrics) -> None:
        handler = type("Handler", (_Renderer,), {"metrics": metrics})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


def _load(daemon: Daemon) -> None:
    """Four clients whose prompts come again or not; more than the pool can keep."""
    until = time.monotonic() + LOAD_SECONDS
    answer = daemon.settings(memory__watermark__high="80%")
    assert answer.status_code == 200, answer.text

    def client(number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            prompt = f"{number} {turn % 7} ".ljust(100, "x") + f"{turn}"
            daemon.complete(prompt, max_tokens=8, ignore_eos=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))


def test_promtool_finds_nothing_to_complain_about(stand: Stand):
    for text in (stand.daemon.http.get("/metrics").text, stand.gpu.render("")[0].decode()):
        check = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
        )
        assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_c112_every_series_is_there_at_the_first_scrape(stand: Stand):
    found = {
        tuple(sorted(sample["metric"].items()))
        for sample in stand.prometheus.query(
            '{job="memd",__name__=~"memd_.*"}', stand.first_scrape_at
        )
    }
    names = {dict(labels)["__name__"] for labels in found}
    missing = []
    for family in FAMILIES.values():
        if family.absent in ("", "no report"):
            missing += [name for name in family.sample_names if name not in names]
    assert missing == []
    for family in FAMILIES.values():
        if family.absent or family.kind == "gauge":
            continue
        name = family.sample_names[-1]
        bounds = [each for each in family.labels.items() if isinstance(each[1], tuple)]
        for values in product(*(bound for _, bound in bounds)):
            wanted = {("__name__", name), *zip((label for label, _ in bounds), values, strict=True)}
            assert any(wanted <= set(labels) for labels in found), wanted


def test_nothing_is_scraped_that_is_not_declared(stand: Stand):
    undeclared = set()
    for sample in stand.prometheus.query('{job="memd",__name__=~"memd_.*"}'):
        labels = dict(sample["metric"])
        family = family_of(labels.pop("__name__"))
        own = labels.keys() - {"job", "instance", "le"}
        if family is None or own != family.labels.keys():
            undeclared.add(str(sample["metric"]))
            continue
        if "le" in labels and labels["le"] != "+Inf":
            assert float(labels["le"]) in family.buckets, family.name
        for label, bound in family.labels.items():
            if isinstance(bound, tuple):
                assert labels[label] in bound, (family.name, labels)
    assert undeclared == set()


def expressions() -> Iterator[tuple[str, str]]:
    """Title and expression of every panel and annotation."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in board["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def test_the_dashboard_is_what_the_registry_and_the_panels_say():
    text = (ROOT / "deploy" / "grafana" / "memd.json").read_text(encoding="utf-8")
    assert text == dashboard_json(), (
        "run: python -m memd.observe.grafana > deploy/grafana/memd.json"
    )


def test_c112_every_expression_of_the_dashboard_returns_data_under_load(stand: Stand):
    empty = []
    for title, expression in expressions():
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression
        # What counts rare events draws nothing until one occurs: the count itself must be there.
        expression = expression.removesuffix(" > 0")
        if not stand.prometheus.query(expression, stand.loaded_at):
            empty.append((title, expression))
    assert empty == []


def test_every_expression_of_a_rule_returns_data_under_load(stand: Stand):
    """What a rule compares with its limit: whether it fires is another matter."""
    rules = load_rules(RULES_FILE)
    every = [*rules.records, *(rule for rule in rules.rules if not rule.absent)]
    texts = {each.name: measured(each.expression, each.by, rules) for each in every}
    for rule in rules.rules:
        for guard in rule.guards:
            texts[f"a guard of {rule.name}"] = measured(guard.expression, rule.by, rules)
    assert [
        name for name, text in texts.items() if not stand.prometheus.query(text, stand.loaded_at)
    ] == []


def test_every_name_in_the_dashboard_is_declared():
    for _, expression in expressions():
        names = re.findall(r"\bmemd_[a-z0-9_]+", expression)
        assert names or "process_start_time_seconds" in expression
        assert [name for name in names if family_of(name) is None] == []
    for variable in dashboard()["templating"]["list"][1:]:
        (name,) = re.findall(r"memd_[a-z0-9_]+", variable["query"]["query"])
        assert family_of(name) is not None


def test_what_was_counted_adds_up(stand: Stand):
    value = stand.prometheus.value
    ok = 'sum(memd_requests_total{job="memd",outcome="ok",endpoint="completions"})'
    stand.prometheus.wait_until(
        lambda: (
            value(ok)
            == stand.daemon.metric("memd_requests_total", outcome="ok", endpoint="completions")
        ),
        10,
        "the last request is scraped",
    )
    assert value(ok) > 10
    queries = value('memd_prefix_query_tokens_total{job="memd"}')
    found = value('sum(memd_prefix_hit_tokens_total{job="memd"})')
    assert queries == found + value('sum(memd_prefix_miss_tokens_total{job="memd"})')
    assert value('sum(memd_evicted_pages_total{job="memd"})') > 0
    assert value('sum(memd_transfer_seconds_count{job="memd"})') == value(
        'sum(memd_transfers_total{job="memd"} + memd_transfer_failures_total{job="memd"})'
    )
    pages = 'sum(memd_pool_pages{job="memd"}) - sum(memd_pool_capacity_pages{job="memd"})'
    assert value(f"max_over_time(({pages})[1m:1s])") == 0
    assert value(f"min_over_time(({pages})[1m:1s])") == 0


def test_c114_what_clients_make_up_is_no_label(stand: Stand):
    def lines() -> int:
        text = stand.daemon.http.get("/metrics").text
        return sum(1 for line in text.splitlines() if not line.startswith("#"))

    before = lines()
    for number in range(60):
        body = {"model": f"made-up-{number}", "prompt": "x", "user": f"user-{number}"}
        assert stand.daemon.post("/v1/completions", body).status_code == 404
        assert stand.daemon.http.get(f"/made/up/{number}").status_code == 404
    assert lines() <= before + 3


def test_without_a_driver_the_api_says_why(stand: Stand):
    answer = stand.daemon.http.get("/admin/v1/gpus")
    assert answer.status_code == 200
    assert answer.json() == {
        "gpus": [],
        "problem": "the engine runs on the CPU",
        "every_seconds": 5.0,
        "poll_failures": 0,
    }
