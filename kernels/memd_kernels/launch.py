"""Launch parameters of the kernels: which tile, how many warps and stages, for a card and a shape.

A table is a JSON file of entries. `tables/` holds one for each compute capability and the safe
defaults for any card; a user's own, which `memd_kernels.tune` writes, comes before them. Looked up
by the launchers, on the thread that launches; answers are kept, so a look-up is a dictionary's.
"""

import functools
import json
import math
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

Source = Literal["user", "shipped", "default"]
Capability = tuple[int, int]
Shape = tuple[tuple[str, int], ...]  # hints by name, sorted

INTERPRETER: Capability = (0, 0)


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched. What the blocks and splits divide, each kernel says itself.

    A field that a kernel has no use for stays at its default; `splits` 0 leaves their number to the
    launcher. `variant` names one of several ways to compute the same where a kernel has them.
    """

    num_warps: int = 4
    num_stages: int = 2
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    splits: int = 0
    variant: str = ""


@dataclass(frozen=True)
class Entry:
    """One row of a table: a launch and what it is for; None: for any."""

    kernel: str
    config: LaunchConfig
    format: str | None = None
    head_dim: int | None = None
    shape: Shape = ()

    def distance(self, shape: dict[str, int]) -> float:
        """How far the shape is from the entry's, in octaves summed over the hints they share."""
        return sum(
            abs(math.log2(max(shape[name], 1) / max(size, 1)))
            for name, size in self.shape
            if name in shape
        )


@dataclass(frozen=True)
class Table:
    """Entries, and the card they were measured on; None: not measured, merely safe."""

    entries: tuple[Entry, ...]
    measured_on: str | None

    def find(
        self, kernel: str, format: str, head_dim: int | None, shape: dict[str, int]
    ) -> LaunchConfig | None:
        """The launch of the nearest shape among the entries that fit most exactly."""
        fitting = [
            entry
            for entry in self.entries
            if entry.kernel == kernel
            and entry.format in (None, format)
            and entry.head_dim in (None, head_dim)
        ]
        if not fitting:
            return None

        def order(entry: Entry) -> tuple[int, float]:
            exact = (entry.format is not None) + (entry.head_dim is not None) + bool(entry.shape)
            return -exact, entry.distance(shape)

        return min(fitting, key=order).config


_user: list[Table] = []  # at most one
_batch_invariant = False


def set_batch_invariant(on: bool) -> None:
    """Let no launch of this process depend on the rows of a batch, or let them again.

    What a row gets is then the same to the bit whatever else is computed with it. Functions of
    `memd_kernels` for which another launch is not enough have a second form (`triton.invariant`).
    Graphs keep what was in force when they were captured.
    """
    global _batch_invariant
    _batch_invariant = on


def batch_invariant() -> bool:
    """Whether launches must not depend on the rows of a batch."""
    return _batch_invariant


def config(
    kernel: str,
    capability: Capability,
    *,
    head_dim: int | None = None,
    format: str = "full",
    **shape: int,
) -> LaunchConfig:
    """Launch parameters from the user's table, else the card's, else the safe defaults.

    Args:
        kernel: Name of the kernel's launcher.
        capability: Compute capability of the device, `launch.capability`.
        head_dim: Where the kernel has one.
        format: Page format or dtype, where launches differ by it.
        shape: Sizes of the call by name. Sizes that change from call to call should be rounded by
            the caller (`bucket`): each new combination is looked up once and kept. `rows` is not
            looked at where launches must be batch-invariant.

    Raises:
        KeyError: no table knows the kernel.
    """
    if _batch_invariant:
        shape.pop("rows", None)
    return _lookup(kernel, capability, head_dim, format, tuple(sorted(shape.items())))


def bucket(size: int) -> int:
    """The least power of two that is not below the size; at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def capability(device: torch.device) -> Capability:
    """Compute capability of a CUDA device; `INTERPRETER` for the CPU."""
    return _cuda_capability(device.index) if device.type == "cuda" else INTERPRETER


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 for the CPU, so that interpreted kernels split too."""
    return _cuda_multiprocessors(device.index) if device.type == "cuda" else 4


def load_user_table(path: Path) -> None:
    """Put a table before the shipped ones, in place of the one loaded before.

    Raises:
        ValueError: the file is not a table. The table loaded before stays.
        OSError: the file cannot be read.
    """
    table = parse_table(path.read_text())
    _user[:] = [table]
    _lookup.cache_clear()


def unload_user_table() -> None:
    """Go back to the shipped tables."""
    _user.clear()
    _lookup.cache_clear()


def source(device_capability: Capability) -> Source:
    """Where a card's launches come from: a user's table, a shipped one measured on such a card, or
    defaults that are safe and may be slow."""
    if _user:
        return "user"
    table = _shipped(device_capability)
    return "shipped" if table is not None and table.measured_on is not None else "default"


def parse_table(text: str) -> Table:
    """Read a table.

    Raises:
        ValueError: the text is not a table.
    """
    try:
        document = json.loads(text)
        entries = tuple(_parse_entry(entry) for entry in document["entries"])
        return Table(entries, document.get("measured_on"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a launch table: {error!r}") from error


def format_table(table: Table) -> str:
    """A table as `parse_table` reads it, an entry a line."""
    lines = []
    for entry in table.entries:
        row: dict[str, Any] = {"kernel": entry.kernel}
        if entry.format is not None:
            row["format"] = entry.format
        if entry.head_dim is not None:
            row["head_dim"] = entry.head_dim
        if entry.shape:
            row["shape"] = dict(entry.shape)
        defaults = LaunchConfig()
        for field in fields(LaunchConfig):
            value = getattr(entry.config, field.name)
            if value != getattr(defaults, field.name):
                row[field.name] = value
        lines.append("    " + json.dumps(row))
    body = ",\n".join(lines)
    name = json.dumps(table.measured_on)
    return f'{{\n  "measured_on": {name},\n  "entries": [\n{body}\n  ]\n}}\n'


def _parse_entry(row: dict[str, Any]) -> Entry:
    row = dict(row)
    kernel, format = row.pop("kernel"), row.pop("format", None)
    head_dim, shape = row.pop("head_dim", None), row.pop("shape", {})
    launch = LaunchConfig(**row)
    for field in fields(LaunchConfig):
        value = getattr(launch, field.name)
        if not isinstance(value, type(field.default)) or (isinstance(value, int) and value < 0):
            raise ValueError(f"{kernel}: {field.name} is {value!r}")
    return Entry(kernel, launch, format, head_dim, tuple(sorted(shape.items())))


@functools.cache
def _lookup(
    kernel: str, capability: Capability, head_dim: int | None, format: str, shape: Shape
) -> LaunchConfig:
    for table in (*_user, _shipped(capability), _defaults()):
        if table is None:
            continue
        found = table.find(kernel, format, head_dim, dict(shape))
        if found is not None:
            return found
    raise KeyError(f"no launch table knows the kernel {kernel}")


@functools.cache
def _shipped(capability: Capability) -> Table | None:
    file = resources.files("memd_kernels") / "tables" / "sm_{}{}.json".format(*capability)
    return parse_table(file.read_text()) if file.is_file() else None


@functools.cache
def _defaults() -> Table:
    return parse_table((resources.files("memd_kernels") / "tables" / "default.json").read_text())


@functools.cache
def _cuda_capability(index: int | None) -> Capability:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _cuda_multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    ).multi_processor_count
