"""The reference page of settings, generated from the tree."""

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from pydantic.fields import FieldInfo

from memd.config import LIVE_KEYS, leaves
from memd.config_words import unit_in, written

_INTRODUCTION = """\
# Settings

Written by `memd settings reference`; a test keeps it true.

A key is spelled the same everywhere: `memory.watermark.high` is nested sections in a file,
`--set memory.watermark.high=85%` on the command line, `MEMD_MEMORY_WATERMARK_HIGH` in the
environment. Later sources win: default, file (`--config`, YAML or TOML), environment, `--set`.
Keys marked *live* can be changed while the daemon runs: by `memd settings set`, or in the file
followed by `memd settings reload` or SIGHUP. The others are read at the start.

A live change lies over the sources until the daemon ends; a change with `--persist` is kept in the
state directory (`live-settings.json`) and lies over them after a restart too. `memd settings get`
tells which source each value comes from, `memd settings diff` what a restart would change, and
`memd settings reset KEY --reason WHY` gives a live value up.

Sizes take decimal (`16MB`) or binary (`16MiB`) units, shares a percent sign (`90%`) or a fraction
(`0.9`), durations `ms`, `s`, `m`, `h` or `d`.

| key | values | default | | meaning |
|---|---|---|---|---|
"""

_PLAIN = {int: "whole number", str: "text", float: "number", bool: "true, false"}


def settings_page() -> str:
    """The page, as Markdown."""
    return _INTRODUCTION + "".join(f"{_row(key, field)}\n" for key, field in leaves().items())


def _row(key: str, field: FieldInfo) -> str:
    unit = unit_in(field.metadata)
    values = unit.name if unit is not None else _values(field.annotation, field.metadata)
    default = written(key, field.default)
    shown = default if field.default is None else f"`{default}`"
    live = "live" if key in LIVE_KEYS else ""
    return f"| `{key}` | {values} | {shown} | {live} | {field.description or ''} |"


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values of a type in words, with their bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return "list"
    if origin is typing.Annotated:
        unit = unit_in(arguments[1:])
        inner = [each for entry in arguments[1:] for each in getattr(entry, "metadata", ())]
        return unit.name if unit is not None else _values(arguments[0], inner)
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
