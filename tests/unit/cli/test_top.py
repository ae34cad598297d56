"""`memd top`: what it draws at any size, and what it asks."""

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from rich.live import Live

from memd.cli.common import shown
from memd.cli.top_screen import SIGNS, Frame, Rates, Screen, pool_bar, rates_between

STATUS: dict[str, Any] = {
    "state": "ready",
    "uptime_seconds": 7380.0,
    "settings_revision": 4,
    "model": {"name": "tiny"},
    "engine": {"pid": 7, "restarts": 0},
    "requests": {"running": 12, "waiting": 3},
    "tokens": {"prompt": {"computed": 100, "device": 40, "host": 2}, "generated": 10},
    "pool": {
        "capacity_pages": 1000,
        "active_pages": 100,
        "cached_pages": 400,
        "quarantined_pages": 1,
        "free_pages": 499,
        "watermark": {"high": 0.9, "low": 0.7},
    },
}
POOL: dict[str, Any] = {
    "layout": {"page_bytes": 4096},
    "reclaiming": True,
    "evicted_pages": {"watermark": 5, "allocation": 1},
    "host_capacity_pages": 64,
    "host_used_pages": 8,
    "transfers_under_way": {"d2h": 1, "h2d": 0},
    "transfers": {"d2h": {"ok": 8, "failed": 2}, "h2d": {"ok": 0, "failed": 0}},
}
ALERT = {
    "name": "PoolAlmostFull",
    "severity": "warning",
    "state": "firing",
    "silenced": False,
    "since": 940.0,
    "summary": "more than 95 % of the pool is active",
}
FRAME = Frame(
    at=1000.0,
    url="http://127.0.0.1:8733",
    status=STATUS,
    pool=POOL,
    alerts=[ALERT],
    rates=Rates(1234.0, 5.0, 345.0, 6.0),
)


def row(number: int, **more: object) -> dict[str, Any]:
    return {
        "id": f"cmpl-{number:032d}",
        "age_seconds": float(number),
        "prompt_tokens": 1000 * number,
        "generated_tokens": 5,
        "max_tokens": 100,
        **more,
    }


def drawn(frame: Frame, width: int = 80, height: int = 30, **console: Any) -> list[str]:
    screen = Console(width=width, height=height, highlight=False, **console)
    with screen.capture() as capture:
        screen.print(Screen(frame))
    return capture.get().splitlines()


def test_everything_it_shows() -> None:
    text = "\n".join(drawn(FRAME, 120))
    for part in (
        *(
            "memd tiny  ready  up 2 h 3 min  settings 4",
            "active 10%",
            "cached 40%",
            "x quarantined",
        ),
        *("of 1,000 pages, 3.9 MiB", "low 70%, high 90%", "reclaiming now", "8 of 64 pages used"),
        *("1 down, 0 up", "failed 2", "12 running  3 waiting", "generated 345"),
        *("prompt 1,234 computed + 5 from cache", "firing PoolAlmostFull (warning) for 1 min"),
    ):
        assert part in text, text


@pytest.mark.parametrize("width", [20, 40, 80, 81, 120, 200])
@pytest.mark.parametrize("height", [5, 24, 60])
def test_it_fits_any_size(width: int, height: int) -> None:
    alerts = [ALERT | {"name": f"Alert{number}"} for number in range(9)]
    frame = replace(FRAME, requests=[row(number) for number in range(300)], alerts=alerts)
    lines = drawn(frame, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 19)  # below that the terminal crops
    if height >= 24:
        assert any("more" in line for line in lines)


def test_without_colour_and_without_unicode_nothing_is_lost() -> None:
    plain = drawn(FRAME, no_color=True)
    assert plain == drawn(FRAME)
    assert "\x1b" not in "".join(plain)

    class Ascii:
        encoding = "ascii"

        def write(self, text: str) -> int:
            return len(text.encode("ascii"))

        def flush(self) -> None: ...

    Console(file=Ascii(), width=80, highlight=False).print(Screen(FRAME))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("active", "cached", "picture"),
    [
        (0, 0, "[········│·│]"),
        (1, 1, "[█▒······│·│]"),
        (500, 0, "[██████··│·│]"),
        (950, 50, "[████████│█│]"),
        (1000, 0, "[████████│█│]"),
        (700, 300, "[████████│▒│]"),
    ],
)
def test_the_bar_shows_what_is_held_and_the_marks(active: int, cached: int, picture: str) -> None:
    counts = STATUS["pool"] | {
        "active_pages": active,
        "cached_pages": cached,
        "quarantined_pages": 0,
        "free_pages": 1000 - active - cached,
    }
    assert f"[{pool_bar(counts, 11, SIGNS).plain}]" == picture


def test_requests_that_run_come_first_then_the_oldest() -> None:
    rows = [
        row(1, state="waiting", waiting_for="capacity"),
        row(2, state="running", cached_tokens=3, pages=4),
        row(3, state="running"),
    ]
    lines = [line.split() for line in drawn(replace(FRAME, requests=rows), 120) if "cmpl" in line]
    assert [line[1] for line in lines] == ["running", "running", "capacity"]
    assert lines[1][-3:] == ["3", "5/100", "4"]
    assert lines[0][-1] == "?"  # unknown is not 0


def test_a_loading_a_failed_and_a_vanished_daemon() -> None:
    bare = STATUS | {"requests": None, "tokens": None, "pool": None}
    loading = bare | {"state": "loading", "stage": "weights", "progress": 0.43}
    text = "\n".join(drawn(Frame(1000.0, "", loading)))
    assert "loading weights, 43%" in text
    assert text.count("not known yet") == 3
    failed = drawn(Frame(1000.0, "", bare | {"state": "failed", "failure": "no memory"}))
    assert "failed: no memory" in failed[0]
    gone = drawn(replace(FRAME, unreachable_since=999.0))
    assert "unreachable since" in gone[0]
    assert any("12 running" in line for line in gone)


def test_rates_need_the_same_engine_twice() -> None:
    later = STATUS | {
        "tokens": {"prompt": {"computed": 300, "device": 60, "host": 2}, "generated": 30}
    }
    after = replace(
        FRAME, at=1002.0, status=later, pool=POOL | {"evicted_pages": {"watermark": 16}}
    )
    assert rates_between(FRAME, after) == Rates(100.0, 10.0, 10.0, 5.0)
    other = replace(after, status=later | {"engine": {"pid": 8, "restarts": 1}})
    assert rates_between(FRAME, other) is None
    assert rates_between(FRAME, FRAME) is None  # no time has passed
    assert rates_between(replace(FRAME, status=STATUS | {"tokens": None}), after) is None


def test_once_for_programs(memd: Callable[..., Result], daemon: Any) -> None:
    daemon.answers["GET /admin/v1/status"] = (200, STATUS)
    daemon.answers["GET /admin/v1/pool"] = (200, POOL)
    daemon.answers["GET /admin/v1/requests"] = (200, {"requests": [row(1)]})
    result = memd("top", "--once", "--every", "200ms", "--format", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["status"]["state"] == "ready"
    assert answer["requests"][0]["prompt_tokens"] == 1000
    assert answer["alerts"] is None  # this daemon keeps none
    assert answer["rates"]["generated_tokens"] == 0
    assert answer["unreachable_since"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "json"], "--once"),
        ([], "no terminal"),
        (["--once", "--every", "1"], "1"),
        (["--once", "--every", "1ms"], "not within 0.2s to 3600s"),
        (["--once", "--every", "2h"], "not within"),
    ],
)
def test_wrong_usage(memd: Callable[..., Result], arguments: list[str], words: str) -> None:
    result = memd("top", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_refused_and_unreachable(memd: Callable[..., Result], daemon: Any, dead_url: str) -> None:
    assert memd("top", "--once", "--url", dead_url).exit_code == 3
    refusal = {"error": {"message": "this key lacks admin:read", "code": "insufficient_scope"}}
    daemon.answers["GET /admin/v1/status"] = (403, refusal)
    result = memd("top", "--once")
    assert result.exit_code == 4
    assert "admin:read" in result.stderr


class InterruptedAt(io.StringIO):
    """A terminal whose user presses Ctrl-C at the moment that something is written to it."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def write(self, text: str) -> int:
        if self._words in text:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("\x1b[?1049h", id="another screen"),
        pytest.param("\x1b[?25l", id="no cursor"),
        pytest.param("memd tiny", id="first drawing"),
        pytest.param("\x1b[?25h", id="cursor"),
    ],
)
def test_ctrl_c_at_any_moment_gives_the_screen_back(words: str) -> None:
    terminal = InterruptedAt(words)
    console = Console(file=terminal, force_terminal=True, width=80, height=24)
    # Ignored where tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            shown(Live("memd tiny", console=console, screen=True)),
        ):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.rindex("\x1b[?1049l") > text.rindex("\x1b[?1049h")
