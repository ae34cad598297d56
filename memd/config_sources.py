"""Where settings come from: defaults, a file, the environment, flags.

Order, later wins: default, file (YAML or TOML), `MEMD_*`, `--set key=value`. A key is spelled the
same everywhere: `memory.watermark.high` in a file or flag is `MEMD_MEMORY_WATERMARK_HIGH` in the
environment. Read at the start, and again when the operator asks for it (memd.settings).
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from memd.config import Settings, build, flatten, leaves
from memd.errors import SettingsError

Origin = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True)
class Sources:
    """What settings are read from, as often as needed.

    Args:
        file: YAML or TOML, by suffix.
        assignments: `key=value` texts, as from `--set`.
        environment: None: the process's.
    """

    file: Path | None = None
    assignments: Sequence[str] = ()
    environment: Mapping[str, str] | None = None

    def read(self) -> "Loaded":
        """Read all sources and validate the result as a whole.

        Raises:
            SettingsError: a source cannot be read, or keys or values are invalid.
        """
        environment = os.environ if self.environment is None else self.environment
        layers: tuple[tuple[Origin, dict[str, Any]], ...] = (
            ("file", _from_file(self.file) if self.file else {}),
            ("environment", _from_environment(environment)),
            ("flag", _from_assignments(self.assignments)),
        )
        flat: dict[str, Any] = {}
        origins: dict[str, Origin] = dict.fromkeys(leaves(), "default")
        for origin, found in layers:
            flat |= found
            origins |= dict.fromkeys(found, origin)
        return Loaded(build(flat), origins, self)


@dataclass(frozen=True)
class Loaded:
    """Settings as the sources give them, and which source gave each key."""

    settings: Settings
    origins: Mapping[str, Origin]
    sources: Sources


def load(
    file: Path | None = None,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings that sources give.

    Raises:
        SettingsError: see `Sources.read`.
    """
    return Sources(file, assignments, environment).read().settings


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        # Its text would quote the file, which may hold a password.
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError({str(path): f"{error.problem or 'not valid YAML'}{where}"}) from None
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
            found[key] = _scalar(variable, text)
    return found


def _from_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise SettingsError({assignment: "must be key=value"})
        found[key.strip()] = _scalar(key.strip(), text)
    return found


def _scalar(name: str, text: str) -> Any:
    """A value as YAML reads it. Raises SettingsError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SettingsError({name: "the value is not valid YAML: put it in quotes"}) from None
