"""`memd debug`: options become a fault plan."""

import json

import pytest

PATH = "/admin/v1/debug/faults"
ANSWER = {"armed": {"fail_commits": 2}, "injected": {"commit": 1}}


def test_options_become_a_plan(memd, daemon):
    daemon.answers[f"PUT {PATH}"] = (200, ANSWER)
    options = ["--delay-copies", "200ms", "--fail-restores", "20%", "--fail-commits", "2"]
    options += ["--request", "cmpl-1=kill", "--request", "*=nan", "--nan-in-free-pages"]
    result = memd("debug", "inject", *options, "--url", daemon.url)
    assert result.exit_code == 0, result.stderr
    assert daemon.body_of(f"PUT {PATH}") == {
        "delay_copies_seconds": 0.2,
        "fail_restores": 0.2,
        "fail_commits": 2,
        "requests": {"cmpl-1": "kill", "*": "nan"},
        "nan_in_free_pages": True,
    }
    assert "armed.fail_commits" in result.stdout


def test_clear_sends_an_empty_plan(memd, daemon):
    daemon.answers[f"PUT {PATH}"] = (200, {"armed": {}, "injected": None})
    assert memd("debug", "clear", "--url", daemon.url).exit_code == 0
    assert daemon.body_of(f"PUT {PATH}") == {}


def test_faults_as_json(memd, daemon):
    daemon.answers[f"GET {PATH}"] = (200, ANSWER)
    result = memd("debug", "faults", "--format", "json", "--url", daemon.url)
    assert json.loads(result.stdout) == ANSWER


@pytest.mark.parametrize(
    "options",
    [
        ["--request", "cmpl-1"],
        ["--request", "cmpl-1=explode"],
        ["--delay-copies", "soon"],
        ["--fail-restores", "200%"],
        ["--fail-commits", "-1"],
    ],
)
def test_what_makes_no_plan_is_wrong_usage(memd, daemon, options):
    result = memd("debug", "inject", *options, "--url", daemon.url)
    assert result.exit_code == 2, result.stderr
    assert daemon.asked == []


def test_a_daemon_without_debug_faults_refuses(memd, daemon):
    error = {"message": "debug.faults is off", "code": "refused"}
    daemon.answers[f"GET {PATH}"] = (409, {"error": error})
    result = memd("debug", "faults", "--url", daemon.url)
    assert result.exit_code == 4
    assert "debug.faults is off" in result.stderr
