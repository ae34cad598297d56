"""The picture of `memd top`: pure functions from what the daemon said to what the screen shows.

Everything that colour says is also said by a sign or a word.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.table import Table
from rich.text import Text

from memd.units import format_duration, format_share, format_size

JSON = Mapping[str, Any]
SIGNS = {"active": "█", "cached": "▒", "quarantined": "x", "free": "·", "mark": "│"}
PLAIN_SIGNS = {"active": "#", "cached": "=", "quarantined": "x", "free": ".", "mark": "|"}
_STYLES = {"active": "red", "cached": "green", "quarantined": "magenta", "free": "dim"}
_STATE_STYLES = {"ready": "bold green", "failed": "bold red", "firing": "bold red"}
_MOST_ALERTS = 4
_LABEL_CELLS = 10


@dataclass(frozen=True)
class Rates:
    """Tokens and pages a second, between two looks at the same engine."""

    computed_tokens: float
    reused_tokens: float  # of prompts, found cached
    generated_tokens: float
    evicted_pages: float


@dataclass(frozen=True)
class Frame:
    """What the daemon said at one moment. None: it did not say.

    Args:
        at: Unix seconds.
        url: Of the daemon.
        status: As `GET /admin/v1/status` answers.
        pool: As `GET /admin/v1/pool`.
        requests: The open ones.
        alerts: The pending and firing ones.
        rates: Since the look before.
        unreachable_since: Unix seconds; then all else is from the last look that came.
    """

    at: float
    url: str
    status: JSON
    pool: JSON | None = None
    requests: Sequence[JSON] | None = None
    alerts: Sequence[JSON] | None = None
    rates: Rates | None = None
    unreachable_since: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def rates_between(before: Frame, after: Frame) -> Rates | None:
    """None unless both saw the same engine serving."""
    old, new = before.status.get("tokens"), after.status.get("tokens")
    seconds = after.at - before.at
    engines = {(each.status.get("engine") or {}).get("pid") for each in (before, after)}
    if not old or not new or seconds <= 0 or len(engines) > 1:
        return None

    def rate(one: float, other: float) -> float:
        return max(0.0, other - one) / seconds

    def reused(tokens: JSON) -> int:
        return sum(count for source, count in tokens["prompt"].items() if source != "computed")

    def evicted(frame: Frame) -> int:
        return sum(((frame.pool or {}).get("evicted_pages") or {}).values())

    return Rates(
        rate(old["prompt"]["computed"], new["prompt"]["computed"]),
        rate(reused(old), reused(new)),
        rate(old["generated"], new["generated"]),
        rate(evicted(before), evicted(after)),
    )


@dataclass(frozen=True)
class Screen:
    """A frame, drawn for whatever size the terminal has when it is drawn."""

    frame: Frame
    hint: str = "q ends"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame, width = self.frame, options.max_width
        signs = PLAIN_SIGNS if options.ascii_only else SIGNS
        cut: OverflowMethod = "crop" if options.ascii_only else "ellipsis"
        lines = [_head(frame, width, cut)]
        lines += [Text(), *_pool(frame, width, signs), *_traffic(frame), *_alerts(frame), Text()]
        if frame.unreachable_since is not None:
            for line in lines[1:]:
                line.stylize("dim")
        for line in lines:
            line.truncate(width, overflow=cut)
            yield line
        height = options.height or console.height
        yield _requests(frame, max(0, height - len(lines) - 3), cut)
        yield Text(self.hint, "dim", end="")


def _head(frame: Frame, width: int, cut: OverflowMethod) -> Text:
    status = frame.status
    state = str(status["state"])
    text = Text()
    text.append(f"memd {status['model']['name']}  ", "bold")
    if frame.unreachable_since is not None:
        since = time.strftime("%H:%M:%S", time.localtime(frame.unreachable_since))
        text.append(f"unreachable since {since}, last values", "bold red")
    else:
        text.append(state, _STATE_STYLES.get(state, "bold yellow"))
        if "stage" in status:
            text.append(f" {status['stage']}, {status['progress']:.0%}")
        if "failure" in status:
            text.append(f": {status['failure']}")
        else:
            text.append(f"  up {format_duration(status['uptime_seconds'])}")
            text.append(f"  settings {status['settings_revision']}")
        if status["engine"]["restarts"]:
            text.append(f"  engine restarts {status['engine']['restarts']}", "yellow")
    clock = time.strftime("%H:%M:%S", time.localtime(frame.at))
    text.truncate(max(0, width - len(clock) - 1), overflow=cut, pad=True)
    return text.append(f" {clock}", "dim")


def _label(name: str) -> Text:
    return Text().append(f"{name:<{_LABEL_CELLS}}", "bold")


def _pool(frame: Frame, width: int, signs: Mapping[str, str]) -> list[Text]:
    counts = frame.status.get("pool")
    if not counts:
        return [_label("pool").append("not known yet", "dim"), Text()]
    capacity = counts["capacity_pages"]
    marks = counts["watermark"]
    cells = max(10, width - _LABEL_CELLS - 2)
    bar = _label("pool").append("[") + pool_bar(counts, cells, signs).append("]")
    text = Text(" " * _LABEL_CELLS)
    for state in ("active", "cached", "quarantined", "free"):
        pages = counts[f"{state}_pages"]
        if pages or state != "quarantined":
            text.append(signs[state], _STYLES[state])
            text.append(f" {state} {format_share(round(pages / capacity, 3))}  ")
    text.append(f"of {capacity:,} pages")
    layout = (frame.pool or {}).get("layout") or {}
    if "page_bytes" in layout:
        text.append(f", {format_size(capacity * layout['page_bytes'])}")
    marked = Text(" " * _LABEL_CELLS).append(f"{signs['mark']} marks ", "dim")
    marked.append(f"low {format_share(marks['low'])}, high {format_share(marks['high'])}")
    if frame.pool is not None and frame.pool["reclaiming"]:
        marked.append("  reclaiming now", "bold yellow")
    return [bar, text, marked, *_host(frame), Text()]


def pool_bar(counts: JSON, cells: int, signs: Mapping[str, str]) -> Text:
    """Active from the left, then cached; a state that holds anything has a cell at least."""
    held = {state: counts[f"{state}_pages"] for state in ("active", "quarantined", "cached")}
    shares = {
        state: max(round(cells * pages / counts["capacity_pages"]), pages > 0)
        for state, pages in held.items()
    }
    while sum(shares.values()) > cells:
        shares[max(shares, key=lambda state: shares[state])] -= 1
    bar = Text()
    for state, share in shares.items():
        bar.append(signs[state] * share, _STYLES[state])
    bar.append(signs["free"] * (cells - len(bar)), _STYLES["free"])
    for mark in counts["watermark"].values():
        at = min(cells - 1, round(cells * mark))
        bar = bar[:at] + Text(signs["mark"], "bold") + bar[at + 1 :]
    return bar


def _host(frame: Frame) -> list[Text]:
    pool = frame.pool
    if pool is None or not pool["host_capacity_pages"]:
        return []
    used, capacity = pool["host_used_pages"], pool["host_capacity_pages"]
    under_way = pool["transfers_under_way"]
    failed = sum(outcomes.get("failed", 0) for outcomes in pool["transfers"].values())
    line = _label("host").append(f"{used:,} of {capacity:,} pages used")
    line.append(f"  copies under way: {under_way['d2h']} down, {under_way['h2d']} up")
    return [line.append(f"  failed {failed}", "bold red") if failed else line]


def _traffic(frame: Frame) -> list[Text]:
    counts, rates = frame.status.get("requests"), frame.rates
    line = _label("requests")
    if counts:
        line.append(f"{counts['running']:,} running  ")
        line.append(f"{counts['waiting']:,} waiting", "yellow" if counts["waiting"] else "")
    else:
        line.append("not known yet", "dim")
    speed = _label("tokens/s")
    if rates is None:
        speed.append("not known yet", "dim")
    else:
        speed.append(f"generated {rates.generated_tokens:,.0f}  ")
        speed.append(f"prompt {rates.computed_tokens:,.0f} computed")
        speed.append(f" + {rates.reused_tokens:,.0f} from cache")
        speed.append(f"  pages evicted/s {rates.evicted_pages:,.0f}")
    return [line, speed]


def _alerts(frame: Frame) -> list[Text]:
    if frame.alerts is None:
        return []
    if not frame.alerts:
        return [_label("alerts").append("none", "green")]
    lines: list[Text] = []
    for alert in frame.alerts[:_MOST_ALERTS]:
        line = _label("alerts" if not lines else "")
        state = "silenced" if alert.get("silenced") else alert["state"]
        line.append(f"{state} ", _STATE_STYLES.get(state, "yellow"))
        line.append(f"{alert['name']} ({alert['severity']})")
        if alert.get("since") is not None:
            line.append(f" for {format_duration(frame.at - alert['since'])}")
        lines.append(line.append(f": {alert['summary']}" if alert.get("summary") else ""))
    if len(frame.alerts) > _MOST_ALERTS:
        more = len(frame.alerts) - _MOST_ALERTS
        lines.append(_label("").append(f"{more} more: memd alerts list"))
    return lines


def _requests(frame: Frame, rows: int, cut: OverflowMethod) -> Table:
    """Running ones first, oldest first; as many as there is room for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("request", no_wrap=True, overflow=cut, max_width=32)
    for name in ("state", "age", "prompt", "cached", "generated", "pages"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    found = list(frame.requests or [])
    found.sort(key=lambda each: (each.get("state") != "running", -each["age_seconds"]))
    room = rows if len(found) <= rows else max(0, rows - 1)
    for each in found[:room]:
        table.add_row(
            str(each["id"]),
            str(each.get("waiting_for") or each.get("state") or "unknown"),
            format_duration(each["age_seconds"]),
            f"{each['prompt_tokens']:,}",
            _number(each.get("cached_tokens")),
            f"{each['generated_tokens']:,}/{_number(each.get('max_tokens'))}",
            _number(each.get("pages")),
        )
    if len(found) > room and rows:
        table.add_row(f"{len(found) - room} more", *[""] * 6)
    return table


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
