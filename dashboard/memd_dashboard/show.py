"""Numbers and times as people read them. What is not known shows as a dash, never as 0."""

import math
from datetime import datetime, tzinfo

from memd.units import format_size

UNKNOWN = "—"


def size(size_bytes: float | None) -> str:
    """Bytes in binary units: 16.0 MiB."""
    return UNKNOWN if size_bytes is None else format_size(size_bytes)


def share(ratio: float | None) -> str:
    """A share of one as a percentage: 0.714 -> 71.4 %."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    percent = round(100 * ratio, 9)  # 0.55 is not quite 55 hundredths
    return (
        f"{percent:.0f} %" if percent == round(percent) or percent >= 99.95 else f"{percent:.1f} %"
    )


def count(number: float | None, unit: str = "") -> str:
    """A whole number with separators; from 100,000 on shortened: 1.2 M."""
    if number is None or not math.isfinite(number):
        return UNKNOWN
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(number) >= limit:
            text = f"{number / (1e3 if letter == 'k' else limit):.3g} {letter}"
            break
    else:
        text = f"{number:,.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.1f}"
    return f"{text} {unit}" if unit else text


def duration(seconds: float | None) -> str:
    """A length of time in one or two units: 12 ms, 1.4 s, 3 min, 2 h 5 min."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.9995:
        milliseconds = 1000 * seconds
        return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def ago(then: float | None, now: float) -> str:
    """How long before `now`, both Unix seconds."""
    if then is None:
        return UNKNOWN
    passed = now - then
    return "just now" if passed < 1 else f"{duration(passed)} ago"


def clock(moment: float | None, zone: tzinfo | None = None) -> str:
    """Time of day of Unix seconds: 14:03:07."""
    return UNKNOWN if moment is None else f"{datetime.fromtimestamp(moment, zone):%H:%M:%S}"


def date(moment: float | None, zone: tzinfo | None = None) -> str:
    """Day and time of Unix seconds: 3 Nov 14:03:07."""
    if moment is None:
        return UNKNOWN
    local = datetime.fromtimestamp(moment, zone)
    return f"{local.day} {local:%b %H:%M:%S}"


def setting(value: object, unit: str | None = None) -> str:
    """The value of a setting, with its unit as the daemon names it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    match unit:
        case "share of one":
            return share(value)
        case "seconds":
            return duration(value)
        case "bytes":
            return size(value) if value else "none"
        case _:
            return f"{value:,} {unit}" if unit else f"{value:,}"
