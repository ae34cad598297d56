"""Where settings come from: defaults, a file, the environment, flags. Read once, at the start.

Order, later wins: default, file (YAML or TOML), `MEMD_*`, `--set key=value`. A key is spelled the
same everywhere: `memory.watermark.high` in a file or flag is `MEMD_MEMORY_WATERMARK_HIGH` in the
environment.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from memd.config import Settings, build, flatten, leaves
from memd.errors import SettingsError


def load(
    file: Path | None = None,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Read all sources and validate the result as a whole.

    Args:
        file: YAML or TOML, by suffix.
        assignments: `key=value` texts, as from `--set`.
        environment: Default: the process's.

    Raises:
        SettingsError: a source cannot be read, or keys or values are invalid.
    """
    flat = _from_file(file) if file else {}
    flat |= _from_environment(os.environ if environment is None else environment)
    flat |= _from_assignments(assignments)
    return build(flat)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError({str(path): str(error)}) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError({str(path): "must hold a mapping of sections"})
    return flatten(tree)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {"MEMD_" + key.upper().replace(".", "_"): key for key in leaves()}
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        key = names.get(variable.replace("__", "_"))
        if key is not None:
            found[key] = yaml.safe_load(text)
    return found


def _from_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise SettingsError({assignment: "must be key=value"})
        found[key.strip()] = yaml.safe_load(text)
    return found
