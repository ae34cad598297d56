"""Launch tables: what is found for a shape, whose table comes first, and the tuner."""

from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest
from memd_kernels import launch, tune
from memd_kernels.launch import Entry, LaunchConfig, Table

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def no_user_table() -> Iterator[None]:
    yield
    launch.unload_user_table()


def table(*entries: Entry) -> Table:
    return Table(entries, "a card")


def load(path: Path, *entries: Entry) -> None:
    path.write_text(launch.format_table(table(*entries)))
    launch.load_user_table(path)


def warps(number: int) -> LaunchConfig:
    return LaunchConfig(num_warps=number)


def test_the_nearest_shape_is_found() -> None:
    found = table(
        Entry("k", warps(1), shape=(("rows", 1), ("size", 4096))),
        Entry("k", warps(2), shape=(("rows", 64), ("size", 4096))),
        Entry("k", warps(8), shape=(("rows", 64), ("size", 576))),
        Entry("other", warps(4)),
    )
    for rows, size, expected in ((1, 4096, 1), (4, 3000, 1), (32, 9000, 2), (16, 600, 8)):
        nearest = found.find("k", "full", None, {"rows": rows, "size": size})
        assert nearest == warps(expected), (rows, size)
    assert found.find("k", "full", 64, {}) == warps(1)
    assert found.find("unknown", "full", None, {}) is None


def test_format_and_head_dim_come_before_shape() -> None:
    found = table(
        Entry("k", warps(1)),
        Entry("k", warps(2), format="int8"),
        Entry("k", warps(4), format="int8", head_dim=128),
        Entry("k", warps(8), head_dim=64),
    )
    for format, head_dim, expected in (
        ("full", 128, 1),
        ("int8", 64, 2),
        ("int8", 128, 4),
        ("full", 64, 8),
    ):
        assert found.find("k", format, head_dim, {"rows": 3}) == warps(expected)


def test_a_user_table_comes_first_and_may_be_partial(tmp_path: Path) -> None:
    before = launch.config("silu_mul", HOPPER, size=4096), launch.config("move_pages", HOPPER)
    load(tmp_path / "table.json", Entry("silu_mul", LaunchConfig(num_warps=32, block_n=64)))
    assert launch.config("silu_mul", HOPPER, size=4096) == LaunchConfig(num_warps=32, block_n=64)
    assert launch.config("move_pages", HOPPER) == before[1]
    assert launch.source(HOPPER) == "user"
    launch.unload_user_table()
    assert launch.config("silu_mul", HOPPER, size=4096) == before[0]


def test_a_card_without_a_table_runs_on_defaults() -> None:
    assert launch.source((7, 5)) == launch.source(launch.INTERPRETER) == "default"
    assert launch.config("silu_mul", (7, 5), size=64).block_n
    with pytest.raises(KeyError, match="no_such_kernel"):
        launch.config("no_such_kernel", HOPPER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"entries": [{}]}',
        '{"entries": [{"kernel": "k", "wraps": 4}]}',
        '{"entries": [{"kernel": "k", "num_warps": "4"}]}',
        '{"entries": [{"kernel": "k", "num_warps": -4}]}',
    ],
)
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    load(tmp_path / "good.json", Entry("silu_mul", warps(16)))
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table|JSON|k: num_warps|Expecting"):
        launch.load_user_table(path)
    assert launch.config("silu_mul", HOPPER) == warps(16)


def test_tables_are_read_as_written() -> None:
    entries = (
        Entry("k", LaunchConfig(8, 5, 64, 32, 16, 3, "library"), "int4", 128, (("rows", 16),)),
        Entry("k", LaunchConfig()),
    )
    assert launch.parse_table(launch.format_table(table(*entries))) == table(*entries)


def test_shipped_tables() -> None:
    files = list((resources.files("memd_kernels") / "tables").iterdir())
    names = {file.name for file in files}
    assert {"default.json", "sm_80.json", "sm_89.json", "sm_90.json", "sm_100.json"} <= names
    kernels = {}
    for file in files:
        kernels[file.name] = {e.kernel for e in launch.parse_table(file.read_text()).entries}
    for name in names:
        assert kernels[name] <= kernels["default.json"], f"{name}: a kernel without a default"


def test_bucket() -> None:
    assert [launch.bucket(size) for size in (0, 1, 2, 3, 8, 9, 1000)] == [1, 1, 2, 4, 8, 16, 1024]


def test_the_tuner_keeps_the_fastest_and_survives_what_cannot_run() -> None:
    times = {1: 5.0, 2: 3.0, 4: 4.0}
    ran: list[int] = []

    def run(config: LaunchConfig) -> None:
        if config.num_warps not in times:
            raise RuntimeError("too many warps")
        ran.append(config.num_warps)

    def measure(call: Callable[[], None]) -> float:
        call()
        return times[ran[-1]]

    entry = Entry("k", LaunchConfig(), "half", None, (("rows", 16),))
    candidates = tuple(warps(number) for number in (1, 2, 4, 64))
    cases = [tune.TuneCase(entry, candidates, run, 2), tune.TuneCase(entry, (warps(64),), run, 1)]
    lines: list[str] = []
    found = tune.tune(cases, "a card", lines.append, measure)
    assert found == table(Entry("k", warps(2), "half", None, (("rows", 16),)))
    assert any("1.50 us" in line for line in lines)
    assert sum("RuntimeError" in line for line in lines) == 2


def test_candidates_of_a_product_can_be_launched() -> None:
    for size, depth in tune.LINEAR_SHAPES:
        candidates = list(tune.linear_candidates(size, depth))
        assert len(candidates) == len(set(candidates)) > 5
        for config in candidates:
            assert 1 <= config.splits <= -(-depth // config.block_k)
