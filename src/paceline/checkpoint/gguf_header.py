"""The header of a GGUF file: metadata and where each tensor lies.

Parsed here and not by `gguf.GGUFReader`, which makes several numpy views of each of 98,000 vocabulary strings: two
seconds a file against a few hundredths. It also needs no package beyond the standard library.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

_SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_SIZE = struct.Struct("<Q")  # of a string


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies."""

    shape: tuple[int, ...]  # row-major, so the reverse of the order in the file
    type_id: int
    offset: int  # from the start of the data section


@dataclass(frozen=True)
class GgufHeader:
    """All of a GGUF file but its tensor data."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data_offset: int

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as `llama`."""
        return str(self.metadata.get("general.architecture"))


class _Cursor:
    """Reads little-endian values from a buffer; running off its end means a truncated file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self.position = 0

    def scalar(self, layout: str) -> Any:
        size = struct.calcsize(layout)
        self._require(size)
        (value,) = struct.unpack_from(layout, self._buffer, self.position)
        self.position += size
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        self._require(size)
        raw = self._buffer[self.position : self.position + size]
        self.position += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path} holds a string that is not UTF-8: {error}") from error

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array()
        if type_id not in _SCALAR_FORMATS:
            raise CheckpointError(f"{self._path} is damaged: metadata value of unknown type {type_id}")
        return self.scalar(_SCALAR_FORMATS[type_id])

    def _array(self) -> list[Any]:
        item_type, count = self.scalar("<I"), self.scalar("<Q")
        self._require(count)  # each item takes a byte at least: stops absurd counts before they allocate
        if item_type == _STRING:
            return self._strings(count)
        if item_type not in _SCALAR_FORMATS:
            return [self.value(item_type) for _ in range(count)]
        layout = f"<{count}{_SCALAR_FORMATS[item_type][1]}"
        size = struct.calcsize(layout)
        self._require(size)
        values = list(struct.unpack_from(layout, self._buffer, self.position))
        self.position += size
        return values

    def _strings(self, count: int) -> list[str]:
        """What `string` gives, `count` times: a vocabulary has 98,000 of them, and calls cost more than reading."""
        buffer, length, position = self._buffer, len(self._buffer), self.position
        size_at, found = _SIZE.unpack_from, []
        try:
            for _ in range(count):
                start = position + _SIZE.size
                position = start + size_at(buffer, position)[0]
                if position > length:
                    break
                found.append(buffer[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path} holds a string that is not UTF-8: {error}") from error
        except struct.error:  # not even the size of the next one
            position = length + 1
        self.position = position
        self._require(0)
        return found

    def _require(self, size: int) -> None:
        if self.position + size > len(self._buffer):
            raise CheckpointError(
                f"{self._path} is truncated: its header goes on past the end of the file ({len(self._buffer)} bytes)",
                hint="a fresh copy of the file",
            )


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensor positions.

    Args:
        path: the file.
    Returns:
        The header; no tensor data is read.
    Raises:
        CheckpointError: missing, not a GGUF file, an unsupported version, truncated, or one part of a split file.
    Source: GGUF version 3, `docs/gguf.md` of the ggml project.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != b"GGUF" or size < 24:
            raise CheckpointError(f"{path} is not a GGUF file ({size} bytes, starts with {magic!r})")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            header = _parse(_Cursor(buffer, path), path)
    num_parts = header.metadata.get("split.count", 0)
    if num_parts > 1:
        raise CheckpointError(f"{path} is one of {num_parts} parts of a split GGUF file; merge them first")
    return header


def _parse(cursor: _Cursor, path: Path) -> GgufHeader:
    cursor.position = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        reason = "of the other byte order" if version & 0xFFFF == 0 else f"of version {version}"
        raise CheckpointError(f"{path} is a GGUF file {reason}; supported are little-endian versions 2 and 3")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        num_dimensions = cursor.scalar("<I")
        if num_dimensions > 4 or name in tensors:
            raise CheckpointError(f"{path} is damaged: tensor {name!r} twice, or with {num_dimensions} dimensions")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dimensions))[::-1]
        tensors[name] = GgufTensor(shape, type_id=cursor.scalar("<I"), offset=cursor.scalar("<Q"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(f"{path} is damaged: general.alignment is {alignment!r}")
    return GgufHeader(path, metadata, tensors, data_offset=-(-cursor.position // alignment) * alignment)
