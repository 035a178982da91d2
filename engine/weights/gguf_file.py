"""A GGUF file opened: metadata, tensor directory, raw bytes on demand.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
The whole header is parsed in one pass over one buffer, because a vocabulary is some hundred
thousand strings. Every tensor's extent is checked against the file's size before anything is read
from it, so a truncated download is one clear error and not garbage.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the directory. `shape` is row-major ([out, in] for a matrix), `offset` absolute.

    `row_bytes` is the stored size of one row (the last dimension), which is a whole number of
    quantization blocks.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """How many rows of the last dimension there are (1 for a vector)."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.rows * self.row_bytes


class GgufFile:
    """An open GGUF file; a context manager that owns the descriptor.

    `metadata` maps keys to bool, int, float, str or lists of them; `tensors` maps names to their
    directory entries. Raises ModelLoadError, naming the file, for anything that is not a complete
    GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise ModelLoadError(f"{path}: {error.strerror or error}") from error
        try:
            self.size = os.fstat(self._descriptor).st_size
            self.metadata, self.tensors = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def read_rows(self, tensor: GgufTensor, start: int, stop: int) -> bytearray:
        """The stored bytes of rows [start, stop). Safe to call from several threads."""
        size, offset = (stop - start) * tensor.row_bytes, tensor.offset + start * tensor.row_bytes
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise ModelLoadError(f"{self.path}: shrank while it was read")
            done += count
        return data

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self.size < 24:
            raise ModelLoadError(f"{self.path}: {self.size} bytes is too short for a GGUF file")
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as view:
            try:
                return _Header(view, self.path).read()
            except struct.error as error:
                raise ModelLoadError(f"{self.path}: truncated inside the header") from error
            except UnicodeDecodeError as error:
                raise ModelLoadError(f"{self.path}: a string in the header is not UTF-8") from error


class _Header:
    """One pass over the header: a cursor and what has been read so far."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view, self._path, self._at = view, path, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._view[:4] != _MAGIC:
            self._refuse("not a GGUF file (wrong magic bytes)")
        self._at = 4
        version = self._scalar(_U32)
        if version not in _VERSIONS:
            self._refuse(f"GGUF version {version} is not supported (2 and 3, little-endian, are)")
        tensor_count, key_count = self._scalar(_U64), self._scalar(_U64)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                self._refuse(f"metadata key {key} appears twice")
            metadata[key] = self._value(self._scalar(_U32), key)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        return metadata, self._directory(entries, metadata)

    def _directory(
        self, entries: list[GgufTensor], metadata: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        """Turn offsets absolute and hold every extent against the file's size."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._refuse(f"general.alignment must be a power of two, not {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        size = len(self._view)
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                self._refuse(f"tensor {entry.name} appears twice")
            start = data_start + entry.offset
            if start + entry.nbytes > size:
                self._refuse(
                    f"truncated: tensor {entry.name} ends at byte {start + entry.nbytes}, "
                    f"the file has {size}"
                )
            tensors[entry.name] = GgufTensor(
                entry.name, entry.shape, entry.type, start, entry.row_bytes
            )
        return tensors

    def _tensor_entry(self) -> GgufTensor:
        name = self._string()
        dimensions = self._scalar(_U32)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(dimensions))[::-1]
        type_id, offset = self._scalar(_U32), self._scalar(_U64)
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            self._refuse(f"tensor {name} has unknown type {type_id}")
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_elements:
            self._refuse(
                f"tensor {name} has rows of {shape[-1]}, not a multiple of {kind.name}'s "
                f"{block_elements}"
            )
        return GgufTensor(name, shape, kind, offset, shape[-1] // block_elements * block_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._scalar(_U32), self._scalar(_U64)
            if item_kind == _STRING:
                return self._strings(count)
            item = self._scalar_format(item_kind, key)
            if count * item.size > len(self._view) - self._at:
                self._refuse(f"truncated inside {key}")
            packed = struct.Struct(f"<{count}{item.format[-1]}")
            values = packed.unpack_from(self._view, self._at)
            self._at += packed.size
            return list(values)
        return self._scalar(self._scalar_format(kind, key))

    def _scalar_format(self, kind: int, key: str) -> struct.Struct:
        if kind not in _SCALARS:
            self._refuse(f"metadata key {key} has a value of unknown type {kind}")
        return _SCALARS[kind]

    def _scalar(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._view, self._at)
        self._at += form.size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        view, at, size = self._view, self._at, len(self._view)
        unpack = _U64.unpack_from
        if count * _U64.size > size - at:
            self._refuse("truncated inside the header")
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(view, at)[0]
            if at > size:
                self._refuse("truncated inside the header")
            strings.append(view[start:at].decode())
        self._at = at
        return strings

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelLoadError(f"{self._path}: {reason}")
