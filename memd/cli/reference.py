"""Settings in words: how a value is written, and the reference page, generated from the tree."""

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from memd.config import LIVE_KEYS, leaves
from memd.units import format_share, parse_duration, parse_share, parse_size

_INTRODUCTION = """\
# Settings

Written by `memd settings reference`; a test keeps it true.

A key is spelled the same everywhere: `memory.watermark.high` is nested sections in a file,
`--set memory.watermark.high=85%` on the command line, `MEMD_MEMORY_WATERMARK_HIGH` in the
environment. Later sources win: default, file (`--config`, YAML or TOML), environment, `--set`.
Keys marked *live* can be changed while the daemon runs (`memd settings set`); the others are read
at the start.

Sizes take decimal (`16MB`) or binary (`16MiB`) units, shares a percent sign (`90%`) or a fraction
(`0.9`), durations `ms`, `s`, `m`, `h` or `d`.

| key | values | default | | meaning |
|---|---|---|---|---|
"""


def exact_size(size_bytes: int) -> str:
    """Bytes as a setting would give them, to the byte: 16MB, 8MiB."""
    units = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3}
    fitting = (unit for unit, factor in units.items() if size_bytes % factor == 0)
    unit = next(fitting, "B")
    return f"{size_bytes // units.get(unit, 1)}{unit}"


# What a text with a unit stands for, and how its default is written back.
_UNITS: dict[Any, tuple[str, Callable[[Any], str]]] = {
    parse_share: ("share", format_share),
    parse_size: ("size", exact_size),
    parse_duration: ("duration", lambda seconds: f"{seconds:.6g}s"),
}
_PLAIN = {int: "whole number", str: "text", float: "number", bool: "true, false"}


def written(key: str, value: Any) -> str:
    """A setting's value as a person would write it: 90%, 16MB, 60s."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    unit = _unit(leaves()[key].metadata) if key in leaves() else None
    return unit[1](value) if unit is not None else str(value)


def settings_page() -> str:
    """The page, as Markdown."""
    return _INTRODUCTION + "".join(f"{_row(key, field)}\n" for key, field in leaves().items())


def _row(key: str, field: FieldInfo) -> str:
    unit = _unit(field.metadata)
    values = unit[0] if unit is not None else _values(field.annotation, field.metadata)
    default = written(key, field.default)
    shown = default if field.default is None else f"`{default}`"
    live = "live" if key in LIVE_KEYS else ""
    return f"| `{key}` | {values} | {shown} | {live} | {field.description or ''} |"


def _unit(metadata: Sequence[Any]) -> tuple[str, Callable[[Any], str]] | None:
    parsers = (entry.func for entry in metadata if isinstance(entry, BeforeValidator))
    return next((_UNITS[parser] for parser in parsers if parser in _UNITS), None)


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values of a type in words, with their bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        unit = _unit(arguments[1:])
        inner = [each for entry in arguments[1:] for each in getattr(entry, "metadata", ())]
        return unit[0] if unit is not None else _values(arguments[0], inner)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_values(kind) for kind in arguments if kind is not type(None))
    pattern = next((p for entry in metadata if (p := getattr(entry, "pattern", None))), None)
    if pattern is not None:
        escaped = str(pattern).strip("^$").replace("|", "\\|")
        return f"`{escaped}`"
    low = next((b for entry in metadata if (b := getattr(entry, "ge", None)) is not None), None)
    high = next((b for entry in metadata if (b := getattr(entry, "le", None)) is not None), None)
    bounds = {
        (False, False): "",
        (True, False): f" from {low}",
        (False, True): f" up to {high}",
        (True, True): f" from {low} to {high}",
    }[low is not None, high is not None]
    return f"{_PLAIN.get(annotation, 'path')}{bounds}"
