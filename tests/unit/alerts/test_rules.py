"""The rule file itself: what it names exists, and what is made of it is up to date."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from memd_alerts.__main__ import DEFAULT_RUNBOOKS
from memd_alerts.promql import render
from memd_alerts.rules import Quantile, RulesError, load_rules, shipped_rules

from memd.config import leaves
from memd.observe.registry import FAMILIES, family_of

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "runbooks"
RULES = shipped_rules()
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


def promtool(*arguments: str) -> str:
    run = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_file_for_prometheus_is_what_the_rules_say():
    page = (PROMETHEUS / "memd.rules.yml").read_text(encoding="utf-8")
    assert page == render(RULES, DEFAULT_RUNBOOKS), "run: memd alerts render > " + str(PROMETHEUS)


@needs_promtool
def test_prometheus_takes_the_rules():
    count = len(RULES.rules) + len(RULES.records)
    assert f"SUCCESS: {count} rules found" in promtool("check", "rules", "memd.rules.yml")


@needs_promtool
def test_the_cases_hold_in_prometheus():
    assert "SUCCESS" in promtool("test", "rules", "memd.rules.test.yml")


def test_c112_every_metric_and_label_that_a_rule_names_is_declared():
    checked = 0
    for selector in RULES.selectors():
        name = selector.metric + ("_bucket" if isinstance(selector, Quantile) else "")
        family = family_of(name)
        assert family is not None, f"{name} is no metric"
        for label, values in selector.where.items():
            known = family.labels[label]
            if not isinstance(known, str):
                assert set(values) <= set(known), f"{name} {label}: {values}"
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.name)
def test_labels_that_a_rule_keeps_are_the_metrics_own(rule):
    selectors = list(RULES.model_copy(update={"rules": (rule,)}).selectors())
    wanted = set(rule.by)
    mine = [
        family_of(s.metric + ("_bucket" if isinstance(s, Quantile) else "")).labels
        for s in selectors
        if family_of(s.metric) or isinstance(s, Quantile)
    ]
    if not rule.prometheus_only:
        assert any(wanted <= set(labels) for labels in mine)


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.name)
def test_each_rule_has_a_runbook_that_says_what_to_do(rule):
    page = RUNBOOKS / f"{rule.name}.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {rule.name}\n")
    for section in ("## What it means", "## How to look", "## What to do"):
        assert section in text
    assert re.search(r"`(memd|journalctl|nvidia-smi|promtool|curl)[ `]", text), "no command"


def test_there_is_no_runbook_without_a_rule():
    names = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert names == {rule.name for rule in RULES.rules}


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_commands_settings_and_metrics_in_runbooks_exist(page):
    root, text = commands(), page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (.*)$", text, re.M))
    for words in re.findall(r"\bmemd ([a-z]+(?: [a-z]+)?)", code):
        name, *rest = words.split()
        assert name in root.commands, words
        group = root.commands[name]
        if rest and hasattr(group, "commands"):
            assert rest[0] in group.commands, words
    sections = {key.partition(".")[0] for key in leaves()}
    for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", text):
        if key.partition(".")[0] in sections and not key.endswith((".yml", ".md")):
            assert any(leaf == key or leaf.startswith(key + ".") for leaf in leaves()), key
    for name in re.findall(r"`(memd_[a-z0-9_]+)`", text):
        assert family_of(name) is not None or name in FAMILIES, name


@cache
def commands():
    from typer.main import get_command

    from memd.cli import app

    return get_command(app)


BASE = {
    "name": "MemdX",
    "group": "g",
    "severity": "page",
    "summary": "s",
    "expression": {"value": {"metric": "m"}},
    "above": 1,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"above": None}, "above or below"),
        ({"below": 1}, "above or below"),
        ({"severity": "loud"}, "severity"),
        ({"expression": {"rate": {"metric": "m"}}}, "over"),
        ({"expression": {"value": {"metric": "m"}, "rate": {}}}, "expression"),
        ({"expression": {"record": {"name": "nobody"}}}, "no such record: nobody"),
        ({"summary": "{gpu} is hot"}, "gpu"),
        ({"for": "5 minutes"}, "'5 minutes' is not a duration"),
        ({"clear": 2}, "clear 2 is beyond the limit 1"),
        ({"absent": True}, "prometheus_only"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_place(tmp_path, change, says):
    path = tmp_path / "rules.yml"
    rule = {key: value for key, value in {**BASE, **change}.items() if value is not None}
    path.write_text(yaml.safe_dump({"rules": [rule]}))
    with pytest.raises(RulesError, match=re.escape(says)) as caught:
        load_rules(path)
    assert str(path) in str(caught.value)


def test_two_rules_of_one_name_are_refused(tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"rules": [BASE, BASE]}))
    with pytest.raises(RulesError, match="named twice: MemdX"):
        load_rules(path)


@pytest.mark.parametrize("text", ["rules: [", "\xff", "7", ""])
def test_a_file_that_is_no_rule_file_is_refused(tmp_path, text):
    path = tmp_path / "rules.yml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RulesError):
        load_rules(path)
    with pytest.raises(RulesError, match="No such file"):
        load_rules(tmp_path / "none")
