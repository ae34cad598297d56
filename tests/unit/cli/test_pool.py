"""`memd pool` and `memd requests`."""

import json

import pytest

from memd.cli.block_map import cells_of, draw

STATES = ("active", "cached", "pinned", "quarantined", "free")


def columns(*blocks, committed=True, first=0):
    """Columns of the admin API, of blocks given by their pages in each state."""
    return {
        "block": list(range(first, first + len(blocks))),
        "committed": [block.pop("committed", committed) for block in blocks],
        "packed": [block.pop("packed", False) for block in blocks],
        **{state: [block.get(state, 0) for block in blocks] for state in STATES},
    }


def test_a_cell_shows_fill_and_what_eviction_cannot_take():
    cells, blocks_a_cell = cells_of(
        columns(
            {"committed": False, "free": 16},
            {"free": 16},
            {"cached": 1, "free": 15},
            {"cached": 15, "active": 1},
            {"active": 4, "quarantined": 2, "pinned": 2, "free": 8},
        )
    )
    assert blocks_a_cell == 1
    assert [cell.glyph for cell in cells] == ["·", " ", "▁", "█", "▄"]
    assert [cell.style for cell in cells] == ["green", "green", "green", "yellow", "red"]


def test_packed_blocks_are_underlined():
    blocks = columns({"cached": 20, "free": 5, "packed": True}, {"active": 16})
    cells, _ = cells_of(blocks)
    assert [cell.style for cell in cells] == ["green underline", "red"]
    assert "underlined packed pages" in draw(blocks).plain
    assert "packed" not in draw(columns({"active": 16})).plain


def test_a_large_pool_fits_the_screen():
    blocks = columns(*({"cached": 16} for _ in range(10_000)))
    cells, blocks_a_cell = cells_of(blocks)
    assert (len(cells), blocks_a_cell) == (1429, 7)
    assert sum(cell.pages for cell in cells) == 160_000
    rows = draw(blocks).plain.splitlines()
    assert len(rows) == 23 + 2
    assert rows[1].startswith("    448 █")
    assert "one cell: 7 blocks" in rows[-1]


def test_an_empty_pool_draws_nothing():
    assert cells_of(columns()) == ([], 1)


def test_map_asks_until_it_has_every_block(daemon, memd):
    pages = {
        0: {"total": 3, "tenants": [], "columns": columns({"cached": 2}, {"free": 2})},
        2: {"total": 3, "tenants": [], "columns": columns({"active": 2}, first=2)},
    }
    for offset, answer in pages.items():
        route = f"GET /admin/v1/pool/blocks?offset={offset}&limit=10000"
        daemon.answers[route] = (200, answer)
    result = memd("pool", "map")
    assert result.stdout.splitlines()[0] == "      0 █ █"
    whole = json.loads(memd("pool", "map", "--format", "json").stdout)
    assert whole["columns"]["block"] == [0, 1, 2]
    assert whole["columns"]["active"] == [0, 0, 2]


def test_map_looks_back(daemon, memd, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    route = "GET /admin/v1/pool/blocks?offset=0&limit=10000&at=700.0"
    answer = {"total": 1, "tenants": [], "columns": columns({"cached": 2}), "time": 690.0}
    daemon.answers[route] = (200, answer)
    lines = memd("pool", "map", "--back", "5m").stdout.splitlines()
    assert lines[0] == "      0 █"
    assert lines[-1].startswith("as it was at 1970-01-01")
    assert memd("pool", "map", "--back", "soon").exit_code == 2


def test_show_names_units_and_leaves_histograms_to_json(daemon, memd):
    pool = {
        "layout": {"page_bytes": 368640},
        "committed_bytes": 0,
        "active_pages": 3,
        "evicted_pages": {"watermark": 7},
        "allocation_seconds": [[0.1], [1, 0], 0.05],
    }
    daemon.answers["GET /admin/v1/pool"] = (200, pool)
    lines = memd("pool", "show").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["layout.page_bytes", "360.0", "KiB"],
        ["committed_bytes", "0", "B"],
        ["active_pages", "3"],
        ["evicted_pages.watermark", "7"],
    ]
    assert json.loads(memd("pool", "show", "--format", "json").stdout) == pool


@pytest.mark.parametrize(("option", "body"), [([], {}), (["--pages", "5"], {"pages": 5})])
def test_reclaim(daemon, memd, option, body):
    daemon.answers["POST /admin/v1/pool/reclaim"] = (200, {"evicted_pages": 5})
    assert memd("pool", "reclaim", *option).stdout == "evicted_pages  5\n"
    assert daemon.body_of("POST /admin/v1/pool/reclaim") == body


@pytest.mark.parametrize(("failed", "code"), [(False, 0), (True, 1)])
def test_defrag_waits_for_its_end_and_tells_what_was_moved(daemon, memd, failed, code):
    daemon.answers["POST /admin/v1/pool/defrag"] = (200, {"started": True, "running": True})
    run = {"moved_pages": 12, "failed": failed, "running": False}
    pool = {"defrag_last_run": run, "defrag_running": False, "fragmentation_ratio": 0.0}
    daemon.answers["GET /admin/v1/pool"] = (200, pool)
    result = memd("pool", "defrag", "--format", "json")
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    assert (answer["moved_pages"], answer["running"]) == (12, False)
    result = memd("pool", "defrag", "--no-wait", "--format", "json")
    assert json.loads(result.stdout) == {"started": True, "running": True}


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["page 3: 1 reference, not 2"], 1)])
def test_audit(daemon, memd, problems, code):
    answer = {"clean": not problems, "problems": problems, "leaked_pages": len(problems)}
    daemon.answers["POST /admin/v1/pool/audit"] = (200, answer)
    result = memd("pool", "audit")
    assert result.exit_code == code
    assert all(problem in result.stdout for problem in problems)


def test_requests(daemon, memd):
    waiting = {"id": "a", "state": "waiting", "pages": 0}
    running = {"id": "b/1", "state": "running", "pages": 4, "queue_seconds": 0.123456789}
    daemon.answers["GET /admin/v1/requests"] = (200, {"requests": [waiting, running]})
    daemon.answers["GET /admin/v1/requests/b%2F1"] = (200, {"id": "b/1", "sequences": [running]})
    daemon.answers["DELETE /admin/v1/requests/a"] = (200, {"id": "a", "cancelled": 1})
    assert [line.split() for line in memd("requests", "list").stdout.splitlines()] == [
        ["id", "state", "pages", "queue_seconds"],
        ["a", "waiting", "0", "-"],
        ["b/1", "running", "4", "0.123457"],
    ]
    assert "b/1  running" in memd("requests", "show", "b/1").stdout
    assert "cancelled  1" in memd("requests", "cancel", "a").stdout
    daemon.answers["DELETE /admin/v1/requests/a?reason=too+long"] = (200, {"id": "a"})
    assert memd("requests", "cancel", "a", "--reason", "too long").exit_code == 0
    assert memd("requests", "cancel", "nobody").exit_code == 4
