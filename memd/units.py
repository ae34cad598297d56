"""Sizes, shares and durations with units, as people write them in settings, and back."""

import math
import re

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z%]*)\s*")


def _split(text: str, kind: str, example: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a {kind}, such as {example}")
    return float(match[1]), match[2]


def parse_size(value: str | int) -> int:
    """Bytes from "16MB" (decimal), "16MiB" (binary) or a whole number of bytes.

    Raises:
        ValueError: no unit on a text, an unknown unit, or not a positive whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"{value!r} is not a size, such as 16MiB")
    if isinstance(value, int):
        size = float(value)
    else:
        number, unit = _split(value, "size", "16MiB")
        if unit.upper() not in _SIZE_UNITS:
            raise ValueError(
                f"{value!r} needs a unit: one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
            )
        size = number * _SIZE_UNITS[unit.upper()]
    if size < 1 or size != int(size):
        raise ValueError(f"{value!r} is not a positive whole number of bytes")
    return int(size)


def parse_size_or_zero(value: str | int) -> int:
    """Like `parse_size`; 0 is allowed, and needs no unit.

    Raises:
        ValueError: see `parse_size`.
    """
    return 0 if value in (0, "0") and not isinstance(value, bool) else parse_size(value)


def parse_share(value: str | float) -> float:
    """A share from 0 to 1, from "90%" or 0.9. A bare 90 is refused: it could mean either.

    Raises:
        ValueError: not a finite number, a bare number as text, or outside 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not a share, such as 90% or 0.9")
    if isinstance(value, str):
        number, unit = _split(value, "share", "90%")
        if unit != "%":
            raise ValueError(f"{value!r} needs a percent sign: 90%")
        share = number / 100
    else:
        share = float(value)
    if not math.isfinite(share) or not 0 <= share <= 1:
        raise ValueError(f"{value!r} is not between 0% and 100%")
    return share


def parse_duration(value: str | float) -> float:
    """Seconds from "250ms", "10s", "5m", "6h" or a number of seconds.

    Raises:
        ValueError: not a finite number at or above 0, or an unknown unit.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not a duration, such as 10s")
    if isinstance(value, str):
        number, unit = _split(value, "duration", "10s")
        if unit not in _DURATION_UNITS:
            raise ValueError(f"{value!r} needs a unit: one of ms, s, m, h, d")
        seconds = number * _DURATION_UNITS[unit]
    else:
        seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{value!r} is not a duration of 0s or more")
    return seconds


def format_size(size_bytes: float) -> str:
    """Bytes in binary units, for people: 16.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_duration(seconds: float) -> str:
    """A time for people, by its two largest units: 45 s, 3 min 20 s, 2 h 3 min, 4 d 2 h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    sizes = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    first = next(index for index, (_, size) in enumerate(sizes) if whole >= size)
    parts = []
    for unit, size in sizes[first : first + 2]:
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts)


def format_share(share: float) -> str:
    """A share as a percentage without needless zeros: 0.9 -> 90%."""
    return f"{share * 100:.6g}%"


def exact_duration(seconds: float) -> str:
    """Seconds in the largest unit of which they are several, exactly: 7d, 90s, 250ms."""
    for unit in ("d", "h", "m"):
        if seconds >= 2 * _DURATION_UNITS[unit] and seconds % _DURATION_UNITS[unit] == 0:
            return f"{seconds / _DURATION_UNITS[unit]:.0f}{unit}"
    number = seconds * 1000 if 0 < seconds < 1 else seconds
    text = f"{number:.9f}".rstrip("0").rstrip(".")
    return f"{text}ms" if 0 < seconds < 1 else f"{text}s"
