"""Packed pages on disk: they come back as they were, so a text goes on as without a restart."""

import random
from pathlib import Path

import pytest
from packed_toy import PackedHarness
from toy import continuation

from memd.engine.messages import PoolCommand
from memd.faults import FaultPlan

FORMATS = ("int8", "int4", "fp8")
TOKENS = 320
HEADER_BYTES = 168
FORMAT = slice(24, 40)  # in a file


def prompt(length: int = TOKENS, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(90), k=length)


def start(path: Path | None, *settings: str, form: str = "int8", **faults: object) -> PackedHarness:
    plan = FaultPlan(nan_in_free_pages=True, **faults)  # type: ignore[arg-type]
    disk = () if path is None else (f"memory.disk.path={path}",)
    return PackedHarness(*disk, *settings, form=form, faults=plan)


def restart(engine: PackedHarness, path: Path, *settings: str, **more: object) -> PackedHarness:
    """As after the engine's death: nothing is settled, and the lock is free."""
    engine.disk.close()
    return start(path, *settings, **more)  # type: ignore[arg-type]


def files_of(path: Path) -> dict[str, list[Path]]:
    """Page files by the format that their headers name."""
    found: dict[str, list[Path]] = {}
    for file in sorted(path.glob("?/*.kv")):
        name = file.read_bytes()[FORMAT].rstrip(b"\0").decode()
        found.setdefault(name, []).append(file)
    return found


def restored(engine: PackedHarness, text: list[int]) -> tuple[list[int], int, list[bool]]:
    """The tokens after a text, how many of it were cached, and which of its pages were packed."""
    request, sequence = engine.submit(text, 10), None
    while sequence is None:
        engine.step()
        running = engine.engine.scheduler.requests.get(request)
        sequence = None if running is None else running.sequence
    packed = [engine.engine.pool.blocks.is_packed(page) for page in sequence.pages]
    engine.finish()
    return engine.tokens(request), engine.cached(request), packed[: TOKENS // 16]


@pytest.mark.parametrize("form", FORMATS)
def test_packed_pages_come_back_from_disk_after_a_restart(tmp_path: Path, form: str) -> None:
    undisturbed = start(None, form=form)
    undisturbed.generate(prompt(), 4)
    expected = restored(undisturbed, [*prompt(), 1, 2, 3])
    assert expected[1:] == (TOKENS, [False, *[True] * 18, False])

    engine = start(tmp_path, form=form)
    engine.generate(prompt(), 4)
    files = files_of(tmp_path)
    assert {name: len(each) for name, each in files.items()} == {"full": 2, f"{form}-16": 18}
    layout = engine.engine.pool.layout
    for name, each in files.items():
        size = HEADER_BYTES + 64 + layout.size_bytes(packed=name != "full")
        assert {file.stat().st_size for file in each} == {size}
    engine = restart(engine, tmp_path, form=form)
    assert restored(engine, [*prompt(), 1, 2, 3]) == expected
    assert engine.packed <= 2, "what was packed on disk is not packed again"
    snapshot = engine.engine.snapshot()
    assert snapshot.pool.prefix_hit_tokens == {"device": 0, "host": 0, "disk": TOKENS}
    assert snapshot.pool.transfers["f2h"] == {"ok": 20, "failed": 0}
    read_bytes = 18 * layout.size_bytes(packed=True) + 2 * layout.page_bytes
    assert snapshot.pool.transferred_bytes["f2h"] == read_bytes
    assert snapshot.pool.host_used_pages == 0
    engine.assert_idle()


def test_a_page_is_written_anew_when_it_is_packed_later(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.generate(prompt(), 4)
    before = files_of(tmp_path)
    engine.generate([*prompt(), *prompt(200, 1)], 4)
    after = files_of(tmp_path)
    assert set(before["int8-16"]) < set(after["int8-16"])
    assert len(set(before["full"]) & set(after["int8-16"])) == 1, "the last page of the prompt"
    disk = engine.engine.pool.disk.index
    assert (len(disk), len(disk.packed)) == (
        sum(map(len, after.values())),
        len(after["int8-16"]),
    )
    engine.assert_idle()
    engine = restart(engine, tmp_path)
    longer = [*prompt(), *prompt(200, 1), 1]
    assert engine.generate(longer, 8) == continuation(longer, 8)
    assert engine.engine.snapshot().pool.prefix_hit_tokens["disk"] == 512
    engine.assert_idle()


def test_the_directory_keeps_its_limit_in_bytes_of_both_formats(tmp_path: Path) -> None:
    page = ("memory.page_tokens=64", "memory.limit=8192 tokens", "memory.block_size=64KiB")
    limit = 400_000
    engine = start(tmp_path, f"memory.disk.limit={limit}B", *page)
    for seed in range(12):
        text = prompt(640, seed)
        request = engine.submit(text, 4)
        engine.step()
        while engine.engine.busy:
            engine.step()
            everything = [tmp_path, *tmp_path.rglob("*")]
            sizes = [-(-max(each.stat().st_size, 1) // 4096) * 4096 for each in everything]
            assert sum(sizes) <= limit
        assert engine.tokens(request) == continuation(text, 4)
    files = files_of(tmp_path)
    index = engine.engine.pool.disk.index
    assert index.packed_page_bytes < index.page_bytes
    assert engine.engine.snapshot().pool.disk_evicted_pages > 0
    count = len(files["full"]) + len(files["int8-64"])
    assert index.capacity_pages() < count <= index.capacity_pages(packed=True)
    engine.assert_idle()


@pytest.mark.parametrize("host", ["0", "1GB", "4KiB"])
def test_texts_whose_packed_pages_push_each_other_off_the_device(tmp_path: Path, host: str) -> None:
    engine = start(tmp_path, f"memory.host.limit={host}")
    for _ in range(2):
        for seed in range(8):
            text = prompt(seed=seed)
            assert engine.generate(text, 4) == continuation(text, 4)
    snapshot = engine.engine.snapshot().pool
    assert snapshot.prefix_hit_tokens["host" if host == "1GB" else "disk"] > 800
    assert len(files_of(tmp_path)["int8-16"]) > 8 * 14
    engine.assert_idle()


def damaged(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "version": (lambda path: damaged(path, 8), "version"),
    "format": (lambda path: damaged(path, 24), "format"),
    "first byte of the page": (lambda path: damaged(path, HEADER_BYTES + 64), "altered"),
    "last byte": (lambda path: damaged(path, -1), "altered"),
    "shorter": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "altered"),
    "full": (  # a header that says so, over packed bytes
        lambda path: path.write_bytes(
            path.read_bytes()[:24] + b"full".ljust(16, b"\0") + path.read_bytes()[40:]
        ),
        "model",
    ),
}


@pytest.mark.parametrize("alive", [True, False], ids=["while it runs", "while it is down"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_a_packed_page_is_a_miss(
    tmp_path: Path, damage: str, alive: bool
) -> None:
    engine = start(tmp_path)
    engine.generate(prompt(), 4)
    engine = restart(engine, tmp_path)
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt()[5 * 16 : 6 * 16])
    (victim,) = (file for file in files_of(tmp_path)["int8-16"] if tokens in file.read_bytes())
    do, reason = DAMAGE[damage]
    do(victim)
    if not alive:
        engine = restart(engine, tmp_path)
    request = engine.submit([*prompt(), 1], 8)
    engine.finish()
    assert engine.tokens(request) == continuation([*prompt(), 1], 8)
    assert engine.cached(request) == 5 * 16
    rejected = engine.engine.snapshot().pool.disk_rejected_files
    assert rejected == {**dict.fromkeys(rejected, 0), reason: 1}
    assert victim in files_of(tmp_path)["int8-16"], "computed, packed and written again"
    engine.assert_idle()


@pytest.mark.parametrize(
    ("settings", "form", "reasons"),
    [
        ((), "int4", {"format": 18, "model": 2}),
        (("memory.page_tokens=32",), "int8", {"format": 18, "model": 2}),  # groups of 32 tokens
        (("kv.recent_tokens=32",), "int8", {"format": 0, "model": 20}),
        (("kv.format=full",), "int8", {"format": 18, "model": 2}),
    ],
)
def test_files_of_other_formats_and_groups_are_removed(
    tmp_path: Path, settings: tuple[str, ...], form: str, reasons: dict[str, int]
) -> None:
    engine = start(tmp_path)
    engine.generate(prompt(), 4)
    engine = restart(engine, tmp_path, *settings, form=form)
    assert files_of(tmp_path) == {}
    rejected = engine.engine.snapshot().pool.disk_rejected_files
    assert rejected == {**dict.fromkeys(rejected, 0), **reasons}
    assert engine.generate(prompt(), 4) == continuation(prompt(), 4)
    assert engine.engine.snapshot().pool.prefix_hit_tokens["disk"] == 0


FAULTS = {
    "late": {"delay_files_seconds": 0.02},
    "all reads fail": {"fail_file_reads": 1.0},
    "all writes fail": {"fail_file_writes": 1.0},
    "full": {"disk_full": True},
    "torn": {"tear_files": 0.3},
    "torn, late and failing": {
        "tear_files": 0.3,
        "delay_files_seconds": 0.005,
        "delay_copies_seconds": 0.003,
        "fail_write_backs": 0.1,
        "fail_restores": 0.1,
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_cost_hits_and_no_text(tmp_path: Path, fault: str) -> None:
    settings = ("memory.host.limit=2KiB", "memory.prefetch.timeout=30ms")
    engine = start(tmp_path, *settings, **FAULTS[fault])
    for _ in range(2):
        for seed in range(6):
            text = prompt(seed=seed)
            assert engine.generate(text, 4) == continuation(text, 4)
            engine.time += 100  # no pause after a fault lasts
    snapshot = engine.engine.snapshot().pool
    if fault in ("full", "all writes fail"):
        reason = "full" if fault == "full" else "failed"
        assert snapshot.disk_dropped_pages[reason] > 0
        assert files_of(tmp_path) == {}
    if "torn" in fault:
        assert snapshot.disk_rejected_files["truncated"] > 0
    engine.assert_idle()
    engine = restart(engine, tmp_path, *settings)
    for seed in range(6):
        text = prompt(seed=seed)
        assert engine.generate(text, 4) == continuation(text, 4)
    engine.assert_idle()


def test_a_flush_forgets_files_of_both_formats(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.generate(prompt(), 4)
    engine.ask(PoolCommand(1, "flush"))
    engine.finish()
    assert files_of(tmp_path) == {}
    assert engine.engine.pool.disk.index.packed == set()
    engine.assert_idle()
