"""`memd prefixes` and `memd tenants`."""

import json

import pytest

ROW = {
    "id": "00000000000000ff",
    "tenant": "ann",
    "start_token": 0,
    "tokens": 800,
    "bytes": 2**20,
    "host_pages": 3,
    "holders": 2,
    "hits": 41,
    "hits_per_hour": 12.5,
    "last_hit_at": None,
    "pinned": True,
    "pinned_until": None,
}
TENANT = {
    "name": "ann",
    "quota": "20%",
    "weight": 2.0,
    "quota_bytes": 2**21,
    "used_bytes": 2**20,
    "pinned_bytes": 0,
    "running": 1,
    "waiting": 0,
    "computed_tokens": 500,
    "rejections": 3,
}


def test_list_sends_filters_and_shows_sizes_and_pins(daemon, memd):
    route = "GET /admin/v1/prefixes?limit=30&sort=hits&tenant=ann&pinned=True"
    daemon.answers[route] = (200, {"prefixes": [ROW]})
    result = memd("prefixes", "list", "--sort", "hits", "--tenant", "ann", "--pinned")
    assert result.exit_code == 0, result.output
    heading, line = result.stdout.splitlines()
    assert heading.split()[:4] == ["id", "tenant", "from", "tokens"]
    assert "1.0 MiB" in line
    assert "never" in line
    assert line.endswith("for good")


@pytest.mark.parametrize(("option", "seconds"), [([], None), (["--ttl", "2h"], 7200.0)])
def test_pin(daemon, memd, option, seconds):
    daemon.answers["POST /admin/v1/prefixes/00ff/pin"] = (
        200,
        {"id": "00ff", "pinned_pages": 8, "pinned_until": None},
    )
    result = memd("prefixes", "pin", "00ff", "--reason", "hot", *option)
    assert result.exit_code == 0, result.output
    sent = daemon.asked[-1][1]
    assert (sent["reason"], sent["ttl_seconds"]) == ("hot", seconds)
    assert "for good" in result.stdout


def test_a_wrong_time_is_told_before_anything_is_sent(daemon, memd):
    result = memd("prefixes", "pin", "00ff", "--reason", "x", "--ttl", "soon")
    assert result.exit_code == 2
    assert "--ttl" in result.output


def test_explain_says_it_in_words(daemon, memd):
    daemon.answers["POST /admin/v1/prefixes/explain"] = (
        200,
        {
            "prompt_tokens": 100,
            "hit_tokens": {"device": 48, "host": 16, "disk": 32},
            "computed_tokens": 36,
            "first_missing_token": 64,
            "reason": "evicted",
            "evicted_age_seconds": 41.7,
            "nearest": {"id": "00ff", "tokens": 64},
        },
    )
    result = memd("prefixes", "explain", "once upon a time", "--tenant", "ann")
    assert daemon.asked[-1][1] == {"prompt": "once upon a time", "tenant": "ann"}
    assert "48 tokens on the device, 16 on the host, 32 on disk" in result.stdout
    assert "it was there, and was evicted, 42 s ago" in result.stdout
    assert memd("prefixes", "explain").exit_code == 2
    assert memd("prefixes", "explain", "text", "--request", "r1").exit_code == 2


def test_tenants_list(daemon, memd):
    nameless = {**TENANT, "name": "", "quota": None, "quota_bytes": None, "used_bytes": None}
    daemon.answers["GET /admin/v1/tenants"] = (200, {"tenants": [TENANT, nameless], "revision": 4})
    lines = memd("tenants", "list").stdout.splitlines()
    assert lines[1].split()[:6] == ["ann", "2.0", "MiB", "2", "1.0", "MiB"]
    assert lines[2].split()[:5] == ["(no", "key)", "none", "2", "-"]


def test_set_keeps_what_is_not_given_and_names_the_revision_it_saw(daemon, memd):
    daemon.answers["GET /admin/v1/tenants"] = (200, {"tenants": [TENANT], "revision": 4})
    daemon.answers["PUT /admin/v1/tenants/ann"] = (200, TENANT)
    assert memd("tenants", "set", "ann", "--reason", "r", "--weight", "3").exit_code == 0
    sent = daemon.asked[-1][1]
    assert (sent["quota"], sent["weight"], sent["revision"]) == ("20%", 3.0, 4)
    assert sent["source"] == "cli"
    memd("tenants", "set", "ann", "--reason", "r", "--quota", "none", "--persist")
    sent = daemon.asked[-1][1]
    assert (sent["quota"], sent["weight"], sent["persist"]) == (None, 2.0, True)


def test_unset(daemon, memd):
    daemon.answers["DELETE /admin/v1/tenants/ann"] = (200, {"name": "ann", "revision": 9})
    result = memd("tenants", "unset", "ann", "--reason", "left")
    assert "revision 9" in result.stdout
    assert json.dumps(daemon.asked[-1][1]).count("left") == 1
