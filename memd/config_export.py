"""Settings as a file: what an export writes is read back as the same values."""

import contextlib
import json
from typing import Any, Literal

import yaml

from memd.config import Settings, dump, flatten, leaves, nest
from memd.config_words import unit_of

FileFormat = Literal["yaml", "toml"]


def export(settings: Settings, form: FileFormat, heading: str, everything: bool = False) -> str:
    """A settings file.

    Args:
        settings: What it says.
        form: YAML or TOML.
        heading: A comment at its top, one line.
        everything: Also what is as by default.
    """
    values, defaults = flatten(dump(settings)), flatten(dump(Settings()))
    chosen = {
        key: _as_people_write(key, value)
        for key, value in values.items()
        if everything or value != defaults[key]
    }
    body = _yaml(chosen) if form == "yaml" else _toml(chosen)
    return f"# {heading}\n{body}"


def _as_people_write(key: str, value: Any) -> Any:
    """With its unit, unless that would round it."""
    unit = unit_of(leaves()[key])
    if unit is None or not isinstance(value, int | float):
        return value
    text = unit.write(value)
    with contextlib.suppress(ValueError):  # too small to be written without an exponent
        return text if unit.read(text) == value else value
    return value


def _yaml(values: dict[str, Any]) -> str:
    if not values:
        return ""
    return yaml.safe_dump(nest(values), sort_keys=False, allow_unicode=True)


def _toml(values: dict[str, Any]) -> str:
    """Keys without a section first; TOML knows no null, so what is null is left out."""
    sections: dict[str, list[str]] = {"": []}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{name} = {_toml_value(value)}\n")
    parts = [(f"[{name}]\n" if name else "") + "".join(ls) for name, ls in sections.items() if ls]
    return "\n".join(parts)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{key} = {_toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{{', '.join(pairs)}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value)
