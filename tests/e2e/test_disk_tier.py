"""The disk tier of a real daemon: killed without warning, it knows its prompts when it is back."""

import os
import random
import signal
from pathlib import Path

import pytest
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

TOKENS = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=2)


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=TOKENS)


def settings(directory: Path) -> tuple[str, ...]:
    return (
        *("memory.page_tokens=16", "memory.limit=1024 tokens", f"memory.disk.path={directory}"),
        *("debug.faults=true", "history.sample_every=1s"),
    )


def answer(daemon: Daemon, seed: int) -> tuple[str, dict[str, int]]:
    """The text, and where the prompt's tokens were found."""
    done = daemon.complete([*prompt(seed), 1], max_tokens=8, ignore_eos=True)
    return done["choices"][0]["text"], done["usage"]["memd"]["cached_tokens_by_tier"]


def written(daemon: Daemon, pages: int) -> None:
    daemon.wait_until(
        lambda: (
            daemon.metric("memd_disk_pages") >= pages
            and daemon.metric("memd_transfer_queue_pages", path="h2f") == 0
            and daemon.metric("memd_disk_wanted_pages") == 0
        ),
        60,
        "all is written",
    )


def test_what_was_known_is_a_hit_from_disk_after_kill_9(model: Path, tmp_path: Path) -> None:
    directory, from_disk = tmp_path / "cache", {"device": 0, "host": 0, "disk": TOKENS}
    lives = [tmp_path / name for name in ("first", "second")]
    for life in lives:
        life.mkdir()
    killed = -signal.SIGKILL
    with serving(lives[0], str(model), *settings(directory), exit_code=killed) as daemon:
        texts = [answer(daemon, seed)[0] for seed in range(3)]
        written(daemon, 3 * TOKENS // 16)
        os.kill(daemon.process.pid, signal.SIGKILL)
    with serving(lives[1], str(model), *settings(directory)) as daemon:
        assert answer(daemon, 0) == (texts[0], from_disk)
        assert daemon.metric("memd_prefix_hit_tokens_total", tier="disk") == TOKENS
        assert daemon.metric("memd_transfers_total", path="f2h") == TOKENS // 16
        used = daemon.metric("memd_tier_used_bytes", tier="disk")
        assert 0 < used < daemon.metric("memd_tier_capacity_bytes", tier="disk")
        # The engine alone dies.
        engine = daemon.http.get("/admin/v1/status").json()["engine"]["pid"]
        os.kill(engine, signal.SIGKILL)
        daemon.wait_until(
            lambda: (
                daemon.http.get("/admin/v1/status").json()["engine"]["restarts"] == 1
                and daemon.http.get("/health/ready").status_code == 200
            ),
            60,
            "the next engine serves",
        )
        assert answer(daemon, 1) == (texts[1], from_disk)
        # An altered file costs a hit and is told.
        victims = sorted(directory.glob("?/*.kv"))
        for victim in victims:
            data = bytearray(victim.read_bytes())
            data[-1] ^= 1
            victim.write_bytes(data)
        assert answer(daemon, 2) == (texts[2], {"device": 0, "host": 0, "disk": 0})
        assert daemon.metric("memd_disk_rejected_files_total", reason="altered") >= 1
        daemon.wait_until(
            lambda: "disk_files_rejected" in daemon.http.get("/admin/v1/events").text, 60, "event"
        )
        # A full disk costs no request.
        plan = {"disk_full": True}
        assert daemon.http.put("/admin/v1/debug/faults", json=plan).status_code == 200
        for seed in range(10, 16):
            answer(daemon, seed)
        assert daemon.metric("memd_disk_dropped_pages_total", reason="full") > 0
        daemon.assert_idle()


def test_packed_pages_are_hits_from_disk_after_kill_9(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    packing = (
        *("kv.format=int8", "kv.full_precision_tokens=64", "kv.recent_tokens=16"),
        *("memory.limit=4096 tokens", "memory.block_size=64KiB"),
    )
    lives = [tmp_path / name for name in ("first", "second")]
    for life in lives:
        life.mkdir()
    killed = -signal.SIGKILL
    with serving(lives[0], str(model), *settings(directory), *packing, exit_code=killed) as daemon:
        answer(daemon, 0)
        undisturbed = answer(daemon, 0)
        assert undisturbed[1]["device"] == TOKENS
        packed = daemon.metric("memd_pool_packed_pages")
        assert packed == 7
        written(daemon, TOKENS // 16)
        os.kill(daemon.process.pid, signal.SIGKILL)
    names = [path.read_bytes()[24:40].rstrip(b"\0") for path in directory.glob("?/*.kv")]
    assert names.count(b"int8-16") == packed
    with serving(lives[1], str(model), *settings(directory), *packing) as daemon:
        text, tiers = answer(daemon, 0)
        assert (text, tiers) == (undisturbed[0], {"device": 0, "host": 0, "disk": TOKENS})
        assert daemon.metric("memd_pool_packed_pages") == packed
        assert daemon.metric("memd_packing_pages_total", outcome="packed") == 0
        daemon.assert_idle()
