"""Reading a GGUF file's header: metadata and where each tensor lies, without copying a tensor.

Own parser, since the gguf package's reader makes several numpy views per string: seconds for a
large vocabulary. Rules: nothing is trusted (every length is held against the file's size before
use), and tensors stay views of the mapped file.
Source: the format's page, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import ConfigError, ModelNotFound

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip

#: Type id to (name, elements per block, bytes per block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor as it lies in the file.

    shape: in elements, row-major (the file lists dimensions the other way round).
    data: uint8 [..., bytes of one row], a read-only view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    data: npt.NDArray[np.uint8]


class GgufFile:
    """The header of the GGUF file `path`: `metadata` by key and `tensors` by name.

    metadata: str, int, float, bool; arrays are list[str] or one-dimensional numpy arrays.
    Raises ModelNotFound where there is no such file, ConfigError where it is no whole GGUF file of
    version 2 or 3.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        cursor = _Cursor(self.path, _map(self.path))
        self.version = _check_magic(cursor)
        num_tensors, num_keys = cursor.count("tensors"), cursor.count("keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(key)
        entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
        cursor.align(_alignment(cursor, self.metadata))
        self.tensors: dict[str, GgufTensor] = {
            name: _tensor(cursor, name, shape, type_id, offset)
            for name, shape, type_id, offset in entries
        }


class _Cursor:
    """A place in the mapped file; every read checks that the file goes on that far."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} is not a usable GGUF file: {what}; fetch it again")

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > self.size:
            raise self.fail(f"it is truncated, {self.size} bytes long where byte {end} is needed")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str) -> int:
        """A length that the rest of the file could hold, at a byte or more each."""
        count = int(self.number("<Q"))
        if count > self.size - self.at:
            raise self.fail(f"it is truncated, {self.size} bytes long with {count} {what} to come")
        return count

    def string(self) -> str:
        return str(self.take(self.count("bytes of text")), "utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """`string` `count` times: vocabularies are read here, so the loop holds no call of ours."""
        data, at, size, found = self.data, self.at, self.size, []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:
                raise self.fail(f"it is truncated, {size} bytes long where byte {at} is needed")
            found.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return found

    def value(self, key: str) -> Any:
        kind = self.number("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self.number(self._form(key, kind))

    def align(self, alignment: int) -> None:
        self.at = -(-self.at // alignment) * alignment

    def _array(self, key: str) -> list[str] | npt.NDArray[Any]:
        kind, count = self.number("<I"), self.count("elements")
        if kind == _STRING:
            return self.strings(count)
        dtype = np.dtype(self._form(key, kind))
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def _form(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.fail(f"{key!r} has the unknown value type {kind}")
        return _SCALARS[kind]


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise ModelNotFound(f"{path} can't be read: {e.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a usable GGUF file: it is empty") from None


def _check_magic(cursor: _Cursor) -> int:
    """The file's version."""
    magic = cursor.take(len(_MAGIC))
    if magic != _MAGIC:
        raise cursor.fail(f"it starts with {magic!r}, not {_MAGIC!r}")
    version = int(cursor.number("<I"))
    if version not in _VERSIONS:
        big_endian = version & 0xFFFF == 0
        raise cursor.fail(
            "it is big-endian" if big_endian else f"its version is {version}, not 2 or 3"
        )
    return version


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    return alignment


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type id, offset from the start of the data)."""
    name, num_dims = cursor.string(), int(cursor.number("<I"))
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    return name, dims[::-1], int(cursor.number("<I")), int(cursor.number("<Q"))


def _tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> GgufTensor:
    if type_id not in TENSOR_TYPES:
        raise cursor.fail(f"tensor {name!r} has the unknown type {type_id}")
    type_name, block_len, block_bytes = TENSOR_TYPES[type_id]
    if shape[-1] % block_len:
        raise cursor.fail(f"tensor {name!r} has rows of {shape[-1]}, not whole {type_name} blocks")
    rows = (*shape[:-1], shape[-1] // block_len * block_bytes)
    start, size_bytes = cursor.at + offset, math.prod(rows)
    if start + size_bytes > cursor.size:
        raise cursor.fail(
            f"it is truncated, {cursor.size} bytes long where tensor {name!r} ends at byte"
            f" {start + size_bytes}"
        )
    data = np.frombuffer(cursor.data, np.uint8, size_bytes, start).reshape(rows)
    return GgufTensor(name=name, shape=shape, type_id=type_id, type_name=type_name, data=data)
