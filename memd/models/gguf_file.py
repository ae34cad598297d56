"""GGUF container: metadata and tensor table, checked against the file before anything is loaded.

The header is read here and not by `gguf.GGUFReader`, which takes seconds for a large vocabulary and
reports damage as array errors without a file or tensor. Types, block sizes and dequantisation are
the `gguf` package's. Every fault is a ModelError of `open_gguf`, before any weight is loaded.

Source:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import functools
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from memd.errors import ModelError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table, with its bytes still in the file.

    Shapes:
        shape: as torch has it, rows first (GGUF stores the reverse).
        data: uint8, memory-mapped, the encoded bytes.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def part(self, start: int, stop: int) -> "GgufTensor":
        """Some of its rows; each row is encoded on its own."""
        data = self.data.reshape(self.shape[0], -1)[start:stop]
        return replace(self, shape=(len(data), *self.shape[1:]), data=data.reshape(-1))

    def dequantise(self) -> NDArray[np.float32]:
        """The values, float32, in `shape`, in memory of their own."""
        block_size, type_size = gguf.GGML_QUANT_SIZES[self.type]
        row_bytes = self.shape[-1] // block_size * type_size
        values = gguf.quants.dequantize(self.data.reshape(-1, row_bytes), self.type)
        # Of F32 tensors dequantize gives a view of the file, which torch will not take as it is.
        return np.require(values, np.float32, "W").reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A whole model: one file, or all the parts of a split one with the metadata of the first."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def require(self, key: str) -> Any:
        """Metadata that has to be there.

        Raises:
            ModelError: it is not.
        """
        if key not in self.metadata:
            raise ModelError(f"metadata has no {key}")
        return self.metadata[key]


def open_gguf(path: Path) -> GgufFile:
    """Read and check the header of a GGUF file; of a split one, any part names the whole.

    Raises:
        ModelError: not GGUF, empty, of an unknown version, cut off (naming the first tensor that
            is), a missing part, or a tensor whose type cannot be dequantised.
    """
    metadata, tensors = _read_part(path)
    paths = _parts(path, metadata)
    if len(paths) > 1:
        parts = [_read_part(part) for part in paths]
        metadata = parts[0][0]
        tensors = [tensor for _, found in parts for tensor in found]
    by_name = {tensor.name: tensor for tensor in tensors}
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(by_name) != expected:
        raise ModelError(f"{path}: {len(by_name)} different tensors, the header counts {expected}")
    return GgufFile(tuple(paths), metadata, by_name)


def _parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    count = metadata.get("split.count", int(match["count"]) if match else 1)
    if count <= 1:
        return [path]
    if match is None:
        raise ModelError(
            f"{path} is one of {count} parts but is not named like model-00001-of-{count:05}.gguf, "
            "so the others cannot be found"
        )
    names = [f"{match['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ModelError(f"{path} is one of {count} parts; missing beside it: {', '.join(missing)}")
    return [path.parent / name for name in names]


class _Cursor:
    """Reads little-endian values one after another, never past the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self.data):
            raise ModelError(
                f"{self.path} is cut off or damaged: the header needs byte {end}, "
                f"the file has {len(self.data)}"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        # The shortest decimal of a float32, so that 1e-5 is not read as 9.99999974e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def text(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item_kind, length = self.scalar("I"), self.scalar("Q")
            if item_kind == _STRING:
                return [self.text() for _ in range(length)]
            code = self._code(item_kind)
            taken = self.take(length * struct.calcsize("<" + code))
            return np.frombuffer(taken, np.dtype(code).newbyteorder("<")).tolist()
        return self.scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is damaged: value type {kind} at byte {self.position}")
        return _SCALARS[kind]


def _read_part(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        size = path.stat().st_size
        # A plain array: slices of a memmap run Python code, which tripled the time of loading.
        data = np.asarray(np.memmap(path, np.uint8, "r") if size else b"")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    if size == 0:
        raise ModelError(f"{path} is empty (0 bytes)")
    if bytes(data[:4]) != b"GGUF":
        raise ModelError(
            f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not b'GGUF'"
        )
    cursor = _Cursor(path, data.data)
    cursor.take(4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} has GGUF version {version}; little-endian 2 and 3 are read")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.text(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
    table = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, must be 1 or more")
    start = -(-cursor.position // alignment) * alignment
    return metadata, list(_tensors(path, data, start, table))


_Entry = tuple[int, str, tuple[int, ...], int]


def _read_entry(cursor: _Cursor) -> _Entry:
    """Offset, name, shape and type number, in an order that sorts by place in the file."""
    name = cursor.text()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
    kind = cursor.scalar("I")
    return cursor.scalar("Q"), name, shape, kind


def _tensors(
    path: Path, data: NDArray[np.uint8], start: int, table: list[_Entry]
) -> Iterator[GgufTensor]:
    for offset, name, shape, kind in sorted(table):
        if not _can_dequantise(kind):
            known = kind in set(GGMLQuantizationType)
            label = GGMLQuantizationType(kind).name if known else str(kind)
            raise ModelError(f"{path}: tensor {name} has type {label}, which is not supported")
        block_size, type_size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block_size or not math.prod(shape):
            raise ModelError(
                f"{path}: tensor {name} has shape {shape}, not in blocks of {block_size}"
            )
        begin = start + offset
        end = begin + math.prod(shape) // block_size * type_size
        if end > len(data):
            raise ModelError(
                f"{path} is cut off: tensor {name} ends at byte {end}, the file has {len(data)}"
            )
        yield GgufTensor(name, GGMLQuantizationType(kind), shape, data[begin:end])


@functools.cache
def _can_dequantise(kind: int) -> bool:
    if kind not in set(GGMLQuantizationType):
        return False
    type_size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]
    try:
        gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True
