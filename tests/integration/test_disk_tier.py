"""The disk tier under the inline engine: pages outlive engines, and no text changes."""

import random
from pathlib import Path

import pytest
import toy
from toy import Harness, continuation

from memd.engine.messages import ApplySettings, PoolCommand, PrefixCommand
from memd.errors import MemdError
from memd.faults import FaultPlan


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def start(path: Path, *settings: str, **faults: object) -> Harness:
    plan = FaultPlan(nan_in_free_pages=True, **faults)  # type: ignore[arg-type]
    return Harness(f"memory.disk.path={path}", *settings, faults=plan)


def restart(harness: Harness, path: Path, *settings: str, **faults: object) -> Harness:
    """As after the engine's death: nothing is settled, and the lock is free."""
    harness.disk.close()
    return start(path, *settings, **faults)


def page_files(path: Path) -> list[Path]:
    return sorted(path.glob("?/*.kv"))


def size_bytes(path: Path) -> int:
    """What `du` counts: whole blocks of files and folders."""
    everything = [path, *path.rglob("*")]
    return sum(-(-max(each.stat().st_size, 1) // 4096) * 4096 for each in everything)


def pressed(harness: Harness, seeds: range, length: int = 320) -> None:
    """Texts whose pages push each other off the device."""
    for seed in seeds:
        assert harness.generate(prompt(length, seed), 4) == continuation(prompt(length, seed), 4)


def test_c045_a_prefix_is_a_hit_from_disk_after_a_restart(tmp_path: Path) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(320), 4)
    files = {path: path.stat().st_ino for path in page_files(tmp_path)}
    assert len(files) == 20
    for _ in range(2):
        harness = restart(harness, tmp_path)
        request_id = harness.submit([*prompt(320), 1, 2, 3], 10)
        harness.finish()
        assert harness.tokens(request_id) == continuation([*prompt(320), 1, 2, 3], 10)
        assert harness.cached(request_id) == 320
        assert harness.outputs[request_id][0].restored_tokens == {"disk": 320}
        snapshot = harness.engine.snapshot()
        assert snapshot.pool.prefix_hit_tokens == {"device": 0, "host": 0, "disk": 320}
        assert snapshot.prompt_tokens["disk"] == 320
        assert snapshot.pool.transfers["f2h"] == {"ok": 20, "failed": 0}
        assert snapshot.pool.prefetched_pages["used"] == 20
        assert snapshot.pool.host_used_pages == 0
        harness.assert_idle()
        assert {path: path.stat().st_ino for path in page_files(tmp_path)} == files


def test_pages_that_leave_the_device_come_back_from_disk(tmp_path: Path) -> None:
    harness = start(tmp_path)
    pressed(harness, range(8))
    before = harness.model.computed_tokens
    pressed(harness, range(8))
    snapshot = harness.engine.snapshot()
    assert snapshot.pool.prefix_hit_tokens["disk"] >= 4 * 304
    assert harness.model.computed_tokens - before < 8 * 320 / 2
    assert snapshot.pool.regretted_pages == 0
    harness.assert_idle()


@pytest.mark.parametrize("host", ["1GB", "2KiB"])
def test_host_and_disk_together(tmp_path: Path, host: str) -> None:
    harness = start(tmp_path, f"memory.host.limit={host}")
    pressed(harness, range(10))
    pressed(harness, range(10))
    snapshot = harness.engine.snapshot().pool
    assert snapshot.prefix_hit_tokens["host" if host == "1GB" else "disk"] > 1000
    assert snapshot.host_used_pages <= max(snapshot.host_capacity_pages, 0)
    harness.assert_idle()


def test_only_what_is_used_twice_or_expensive_is_written(tmp_path: Path) -> None:
    harness = start(tmp_path, "memory.disk.expensive_tokens=160")
    harness.generate(prompt(100), 4)
    assert page_files(tmp_path) == []
    harness.generate([*prompt(100), 5], 4)
    assert len(page_files(tmp_path)) == 6
    harness.generate(prompt(200, 1), 4)
    assert len(page_files(tmp_path)) == 6 + 12
    harness.ask(ApplySettings(1, 2, {"memory.disk.expensive_tokens": "auto"}))
    harness.generate(prompt(64, 2), 4)
    assert len(page_files(tmp_path)) == 6 + 12 + 4


def test_c047_the_directory_never_outgrows_its_limit(tmp_path: Path) -> None:
    limit = 400_000
    harness = start(tmp_path, f"memory.disk.limit={limit}B")
    for seed in range(30):
        harness.submit(prompt(160, seed), 4)
        harness.step()
        while harness.engine.busy:
            harness.step()
            assert size_bytes(tmp_path) <= limit
    snapshot = harness.engine.snapshot().pool
    assert snapshot.disk_evicted_pages > 0
    assert snapshot.disk_used_bytes is not None
    assert size_bytes(tmp_path) <= snapshot.disk_used_bytes <= limit
    # The newest are there, the oldest are not.
    harness = restart(harness, tmp_path, f"memory.disk.limit={limit}B")
    newest, oldest = (harness.submit(prompt(160, seed), 1) for seed in (29, 0))
    harness.finish()
    assert (harness.cached(newest), harness.cached(oldest)) == (144, 0)


def test_c047_a_full_disk_costs_no_request(tmp_path: Path) -> None:
    harness = start(tmp_path, disk_full=True)
    pressed(harness, range(8))
    snapshot = harness.engine.snapshot().pool
    assert snapshot.disk_dropped_pages["full"] >= 8 * 20
    assert snapshot.disk_fault == "full"
    assert page_files(tmp_path) == []
    harness.arm(disk_full=False)
    harness.time += 100
    pressed(harness, range(2))
    assert len(page_files(tmp_path)) >= 40
    assert harness.engine.snapshot().pool.disk_fault is None
    harness.assert_idle()


def test_the_limit_is_live(tmp_path: Path) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(320), 4)
    harness.ask(ApplySettings(1, 2, {"memory.disk.limit": 100_000}))
    harness.finish()
    assert 0 < len(page_files(tmp_path)) < 20
    assert size_bytes(tmp_path) <= 100_000
    harness.ask(ApplySettings(2, 3, {"memory.disk.limit": 0}))
    harness.finish()
    assert page_files(tmp_path) == []
    harness.generate(prompt(320, 1), 4)
    assert page_files(tmp_path) == []
    assert harness.engine.snapshot().pool.disk_dropped_pages["limit"] > 0
    harness.assert_idle()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "magic": (lambda path: flip(path, 0), "altered"),
    "version": (lambda path: flip(path, 8), "version"),
    "page size": (lambda path: flip(path, 13), "model"),
    "format": (lambda path: flip(path, 24), "format"),
    "model": (lambda path: flip(path, 40), "model"),
    "parent": (lambda path: flip(path, 80), "altered"),
    "key": (lambda path: flip(path, 110), "altered"),
    "checksum": (lambda path: flip(path, 140), "altered"),
    "tokens": (lambda path: flip(path, 170), "altered"),
    "first byte of the page": (lambda path: flip(path, -256), "altered"),
    "last byte": (lambda path: flip(path, -1), "altered"),
    "shorter by one": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
    "half": (lambda path: path.write_bytes(path.read_bytes()[:200]), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "altered"),
}


@pytest.mark.parametrize("alive", [True, False], ids=["while it runs", "while it is down"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_c049_a_damaged_file_is_a_miss_and_is_removed(
    tmp_path: Path, damage: str, alive: bool
) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(160), 4)
    files = set(page_files(tmp_path))
    harness = restart(harness, tmp_path)
    victim = next(path for path in files if page_number(path, 160) == 4)
    do, reason = DAMAGE[damage]
    do(victim)
    if not alive:
        harness = restart(harness, tmp_path)
    request_id = harness.submit([*prompt(160), 1], 8)
    harness.finish()
    assert harness.tokens(request_id) == continuation([*prompt(160), 1], 8)
    assert harness.cached(request_id) == 64
    rejected = harness.engine.snapshot().pool.disk_rejected_files
    assert rejected == {**dict.fromkeys(rejected, 0), reason: 1}
    assert set(page_files(tmp_path)) == files  # computed and written again
    harness.assert_idle()
    harness = restart(harness, tmp_path)
    harness.generate([*prompt(160), 1], 8)
    assert harness.engine.snapshot().pool.prefix_hit_tokens["disk"] == 160


def page_number(path: Path, length: int) -> int:
    """Which page of a prompt a file holds."""
    data = path.read_bytes()
    tokens = data[-256 - 64 : -256]
    text = b"".join(token.to_bytes(4, "little") for token in prompt(length))
    return text.index(tokens) // 64


def test_a_file_of_other_tokens_is_no_hit_whatever_its_name(tmp_path: Path) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(160), 4)
    harness.generate(prompt(160, 1), 4)
    harness = restart(harness, tmp_path)
    first, other = (
        next(path for path in page_files(tmp_path) if holds(path, prompt(160, seed)[:16]))
        for seed in (0, 1)
    )
    first.write_bytes(other.read_bytes())
    assert harness.generate(prompt(160), 8) == continuation(prompt(160), 8)
    assert harness.engine.snapshot().pool.disk_rejected_files["altered"] == 1


def holds(path: Path, tokens: list[int]) -> bool:
    return b"".join(token.to_bytes(4, "little") for token in tokens) in path.read_bytes()


def test_files_of_other_settings_are_removed(tmp_path: Path) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(160), 4)
    assert len(page_files(tmp_path)) == 10
    harness = restart(harness, tmp_path, "memory.page_tokens=32")
    assert page_files(tmp_path) == []
    assert harness.engine.snapshot().pool.disk_rejected_files["model"] == 10
    assert harness.generate(prompt(160), 4) == continuation(prompt(160), 4)
    assert len(page_files(tmp_path)) == 5


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    foreign = [tmp_path / "notes.txt", tmp_path / "a" / "x.kv", tmp_path / "a" / "README"]
    for path in foreign:
        path.write_text("mine")
    target = tmp_path / "notes.txt"
    link = tmp_path / "a" / ("0" * 63 + ".kv")
    link.symlink_to(target)
    left = tmp_path / "a" / ("1" * 63 + ".kv.tmp")
    left.write_text("half")
    harness = start(tmp_path)
    pressed(harness, range(6))
    harness.ask(PoolCommand(1, "flush"))
    harness.finish()
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert link.is_symlink()
    assert not left.exists()
    assert page_files(tmp_path) == [link, tmp_path / "a" / "x.kv"]


def test_nobody_else_reads_the_files(tmp_path: Path) -> None:
    harness = start(tmp_path / "new" / "cache")
    harness.generate(prompt(160), 4)
    folders = [tmp_path / "new" / "cache", *(tmp_path / "new" / "cache").glob("?")]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    files = [*page_files(tmp_path / "new" / "cache"), tmp_path / "new" / "cache" / "memd.lock"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_salts_share_nothing_on_disk(tmp_path: Path) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(160), 4, salt="one")
    harness = restart(harness, tmp_path)
    other = harness.submit([*prompt(160), 1], 4, salt="two")
    bare = harness.submit([*prompt(160), 2], 4)
    same = harness.submit([*prompt(160), 3], 4, salt="one")
    harness.finish()
    assert [harness.cached(each) for each in (other, bare, same)] == [0, 0, 160]
    assert not any(b"one" in path.read_bytes() for path in page_files(tmp_path))


def test_two_engines_never_share_a_directory(tmp_path: Path) -> None:
    harness = start(tmp_path)
    with pytest.raises(MemdError, match=r"memory[.]disk[.]path: .* is in use by the engine"):
        start(tmp_path)
    harness.generate(prompt(160), 4)
    assert len(page_files(tmp_path)) == 10


def test_a_directory_that_cannot_be_used_is_served_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    harness = start(tmp_path / "file" / "cache")
    pressed(harness, range(3))
    snapshot = harness.engine.snapshot().pool
    assert snapshot.disk_fault == "gone"
    assert snapshot.disk_dropped_pages["gone"] >= 3
    harness.assert_idle()


def test_a_directory_that_vanishes_costs_hits_only(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    harness = start(path)
    pressed(harness, range(8))
    path.rename(tmp_path / "moved")
    pressed(harness, range(8))
    assert not path.exists()
    assert harness.engine.snapshot().pool.disk_dropped_pages["gone"] > 0
    (tmp_path / "moved").rename(path)
    harness.time += 100
    pressed(harness, range(10, 13))
    assert harness.engine.snapshot().pool.disk_fault is None
    harness.assert_idle()


FAULTS = {
    "late": {"delay_files_seconds": 0.02},
    "all reads fail": {"fail_file_reads": 1.0},
    "all writes fail": {"fail_file_writes": 1.0},
    "some of both fail": {"fail_file_reads": 0.2, "fail_file_writes": 0.02},
    "torn": {"tear_files": 0.3},
    "torn and late copies": {
        "tear_files": 0.3,
        "delay_files_seconds": 0.005,
        "delay_copies_seconds": 0.003,
        "fail_write_backs": 0.1,
        "fail_restores": 0.1,
    },
}


@pytest.mark.parametrize("host", ["0", "4KiB"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_no_text(tmp_path: Path, fault: str, host: str) -> None:
    harness = start(tmp_path, f"memory.host.limit={host}", **FAULTS[fault])
    rng = random.Random(5)
    stems = [prompt(160, seed) for seed in range(10)]
    for _ in range(2):
        expected = {}
        for _ in range(16):
            text = rng.choice(stems) + prompt(rng.randrange(1, 40), rng.randrange(10**6))
            expected[harness.submit(text, 12)] = continuation(text, 12)
            harness.step(3)
        harness.finish(6000)
        for request_id, tokens in expected.items():
            assert harness.tokens(request_id) == tokens
        harness.assert_idle()
        harness = restart(harness, tmp_path, f"memory.host.limit={host}", **FAULTS[fault])
    harness.disk.close()


def test_c041_a_prefix_larger_than_the_staging_memory(tmp_path: Path) -> None:
    harness = start(tmp_path, "memory.disk.staging=1KiB")
    harness.generate(prompt(640), 4)
    assert len(page_files(tmp_path)) == 40
    harness = restart(harness, tmp_path, "memory.disk.staging=1KiB")
    assert harness.engine.pool.host.staging == 4
    request_id = harness.submit([*prompt(640), 1], 8)
    harness.finish()
    assert harness.tokens(request_id) == continuation([*prompt(640), 1], 8)
    assert harness.outputs[request_id][0].restored_tokens == {"disk": 640}
    assert harness.engine.snapshot().pool.host_used_pages == 0
    harness.assert_idle()


def test_c043_what_is_being_written_is_never_read(tmp_path: Path) -> None:
    harness = start(tmp_path, delay_files_seconds=1.0)
    harness.generate(prompt(320), 4)
    harness.submit(prompt(16, 1), 1)
    harness.step(3)
    harness.send(PoolCommand(7, "reclaim", 64))
    harness.step(2)
    ids = [harness.submit([*prompt(320), each], 8) for each in (1, 2)]
    harness.finish(50_000)
    for each, request_id in zip((1, 2), ids, strict=True):
        assert harness.tokens(request_id) == continuation([*prompt(320), each], 8)
    assert sum(harness.engine.snapshot().pool.disk_rejected_files.values()) == 0
    harness.assert_idle()


def test_c051_restores_for_some_never_keep_all_from_starting(tmp_path: Path) -> None:
    settings = ("memory.disk.staging=2KiB",)
    harness = start(tmp_path, *settings)
    pressed(harness, range(8), 480)
    harness = restart(harness, tmp_path, *settings, delay_files_seconds=0.002)
    ids = [harness.submit(prompt(480, seed), 40) for seed in range(8)]
    harness.finish(6000)
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation(prompt(480, seed), 40)
    assert harness.engine.snapshot().pool.prefix_hit_tokens["disk"] >= 6 * 464
    harness.assert_idle()


def test_c053_a_queue_of_prefixes_on_disk_arrives_ahead(tmp_path: Path) -> None:
    settings = ("memory.prefetch.lookahead=4",)
    harness = start(tmp_path, *settings)
    pressed(harness, range(20), 240)
    harness = restart(harness, tmp_path, *settings, delay_files_seconds=0.05)
    ids = [harness.submit([*prompt(240, seed), 7], 8) for seed in range(20)]
    harness.finish(50_000)
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation([*prompt(240, seed), 7], 8)
        assert harness.cached(request_id) == 240
    moved = harness.engine.snapshot().pool
    assert moved.prefetched_pages["used"] >= 0.9 * moved.transfers["f2h"]["ok"]
    assert harness.model.computed_tokens == 20 * (1 + 7)
    harness.assert_idle()


def test_c053_a_disk_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    settings = ("memory.prefetch.timeout=200ms",)
    harness = start(tmp_path, *settings)
    pressed(harness, range(4), 240)
    harness = restart(harness, tmp_path, *settings, delay_files_seconds=5.0)
    ids = [harness.submit(prompt(240, seed), 8) for seed in range(4)]
    turn = harness.time
    for request_id in ids:
        while harness.outputs.get(request_id) is None:
            harness.step()
            harness.time += 0.005
        assert harness.time - turn < 0.35
        turn = harness.time
    harness.time += 10
    harness.finish(6000)
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation(prompt(240, seed), 8)
    harness.assert_idle()


def test_a_flush_forgets_the_disk_too(tmp_path: Path) -> None:
    harness = start(tmp_path, delay_files_seconds=0.01)
    harness.generate(prompt(320), 4)
    harness.submit(prompt(320, 1), 2)
    harness.step(4)  # some are being written
    harness.ask(PoolCommand(1, "flush"))
    harness.finish()
    request_id = harness.submit([*prompt(320), 1], 4)
    harness.finish()
    assert harness.cached(request_id) == 0
    harness = restart(harness, tmp_path)
    harness.ask(PoolCommand(2, "flush"))
    harness.finish()
    assert page_files(tmp_path) == []


def test_an_evicted_prefix_is_gone_from_disk(tmp_path: Path) -> None:
    harness = start(tmp_path)
    harness.generate(prompt(160), 4)
    top = harness.engine.pool.tree.namespaces()[0]
    (node,) = harness.engine.pool.tree.page_children(harness.engine.pool.tree.root(top))
    reply = harness.ask(PrefixCommand(1, "evict", node.key[:8].hex()))
    assert reply.error is None
    harness.finish()
    assert page_files(tmp_path) == []
