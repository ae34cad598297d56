"""Settings in words: how a value is written, its unit, and what it may be set to."""

import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from memd.config import Settings, leaves
from memd.units import (
    exact_duration,
    format_share,
    parse_duration,
    parse_share,
    parse_size,
    parse_size_or_zero,
)


class Unit(NamedTuple):
    """Of settings that are written with a unit.

    Args:
        name: Of what they are: share, size, duration.
        base: What a number of them counts.
        write: A number in `base` as a person would write it.
        read: The reverse; raises ValueError.
    """

    name: str
    base: str
    write: Callable[[Any], str]
    read: Callable[[str], float]


def exact_size(size_bytes: int) -> str:
    """Bytes as a setting would give them, to the byte: 16MB, 8MiB."""
    if size_bytes == 0:
        return "0"
    units = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3}
    fitting = (unit for unit, factor in units.items() if size_bytes % factor == 0)
    unit = next(fitting, "B")
    return f"{size_bytes // units.get(unit, 1)}{unit}"


_SIZE = Unit("size", "bytes", exact_size, parse_size_or_zero)
_UNITS: dict[Any, Unit] = {
    parse_share: Unit("share", "share of one", format_share, parse_share),
    parse_size: _SIZE,
    parse_size_or_zero: _SIZE,
    parse_duration: Unit("duration", "seconds", exact_duration, parse_duration),
}
_TYPES = ("integer", "number", "boolean", "array")
_COUNTED = re.compile(r"[._](tokens|pages|sequences)(?:_per_(step))?$")


def unit_in(metadata: Iterable[Any]) -> Unit | None:
    """The unit that metadata of a type gives it."""
    parsers = (entry.func for entry in metadata if isinstance(entry, BeforeValidator))
    return next((_UNITS[parser] for parser in parsers if parser in _UNITS), None)


def _metadata(annotation: Any, metadata: Iterable[Any]) -> Iterator[Any]:
    """What validates a setting, of all alternatives."""
    for entry in metadata:
        yield from getattr(entry, "metadata", (entry,))  # a Field inside a type has its own
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        yield from _metadata(arguments[0], arguments[1:])
    else:
        for argument in arguments:
            yield from _metadata(argument, ())


def unit_of(field: FieldInfo) -> Unit | None:
    """The unit of a setting's values; None: they are written without one."""
    return unit_in(_metadata(field.annotation, field.metadata))


def written(key: str, value: Any) -> str:
    """A setting's value as a person would write it: 90%, 16MB, 60s."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False) if value else "none"
    if key not in leaves() or isinstance(value, str):
        return str(value)  # a text is as it was written: auto, 80%, 1024 tokens
    field = leaves()[key]
    unit = unit_of(field) or (_SIZE if _unit_name(key, field, None) == "bytes" else None)
    return str(value) if unit is None else unit.write(value)


@cache
def allowed(key: str) -> dict[str, Any]:
    """What a setting may be set to, alone; sections have rules of their own.

    Returns:
        `type`: number, integer, boolean, array or string; `unit` of numbers, or null; `minimum` and
        `maximum` in that unit, or null; `choices`, words that are allowed; `nullable`.
    """
    field, branches = leaves()[key], _branches(key)
    unit, metadata = unit_of(field), list(_metadata(field.annotation, field.metadata))
    words = [b.get("enum", [b["const"]] if "const" in b else []) for b in branches]
    kinds = [b["type"] for b, said in zip(branches, words, strict=True) if "type" in b and not said]
    typed = [] if "string" in kinds else [kind for kind in kinds if kind in _TYPES]
    lows = [0] if unit is not None else []
    highs = [1] if unit is not None and unit.name == "share" else []
    lows += [bound for entry in metadata if (bound := _bound(entry, "ge", "gt")) is not None]
    highs += [bound for entry in metadata if (bound := _bound(entry, "le", "lt")) is not None]
    return {
        "type": next(iter(typed), "string"),
        "unit": _unit_name(key, field, unit),
        "minimum": max(lows, default=None),
        "maximum": min(highs, default=None),
        "choices": list(chain.from_iterable(words)),
        "nullable": "null" in kinds,
    }


def _bound(entry: Any, *names: str) -> Any:
    found = (getattr(entry, name, None) for name in names)
    return next((bound for bound in found if bound is not None), None)


def _unit_name(key: str, field: FieldInfo, unit: Unit | None) -> str | None:
    """What a number of a setting counts: as its type or its field says, or its name."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and isinstance(extra.get("unit"), str):
        return str(extra["unit"])
    if unit is not None:
        return unit.base
    counted = _COUNTED.search(key)
    return " per ".join(filter(None, counted.groups())) if counted else None


def _branches(key: str) -> list[dict[str, Any]]:
    """The alternatives of a setting in the JSON schema of the tree."""
    schema: dict[str, Any] = _schema()
    node = schema
    for name in key.split("."):
        node = node["properties"][name]
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    branches: list[dict[str, Any]] = node.get("anyOf", [node])
    return branches


@cache
def _schema() -> dict[str, Any]:
    return Settings.model_json_schema()
