"""The safetensors format, written as a stream and read as a map.

A file is a little-endian 64-bit length, a JSON header of that length (name → dtype, shape, offsets), and the arrays' bytes in the order
of the header (https://huggingface.co/docs/safetensors). Its own library writes whole arrays only; a checkpoint's come in pieces.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from ..core.untrusted.bounded_json import MOST_BYTES, JsonObject, first_problem, open_regular, parse_json

__all__ = ["header", "map_arrays"]

_TYPES = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<u4": "U32", "<i4": "I32", "<u8": "U64", "<i8": "I64",
    "<f2": "F16", "<f4": "F32", "<f8": "F64",
}  # fmt: skip
_NUMPY_TYPES = {name: dtype for dtype, name in _TYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


def header(arrays: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Return what stands before the values, given each array's (name, numpy type, shape, bytes) in the order of the values.

    Raises ValueError for a type that the format does not know, or a name that occurs twice.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape, size in arrays:
        if dtype not in _TYPES:
            raise ValueError(f"{name}: safetensors has no type for numpy's {dtype!r}; it has {', '.join(_TYPES)}")
        if name in described:
            raise ValueError(f"{name!r} occurs twice")
        described[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


class _Entry(JsonObject):
    """What the header says of one array."""

    dtype: str
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)]  # numpy has no more dimensions
    data_offsets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


_ENTRIES = TypeAdapter(dict[str, _Entry])
_METADATA = TypeAdapter(dict[str, str] | None)


def map_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return a file's arrays by name, in file order, as read-only maps: what is not looked at is not read.

    Raises ValueError, saying what is wrong, where the file is not of the format: each byte behind the header belongs to one array.
    """
    with open_regular(path) as file:
        try:
            return _mapped(np.memmap(file, np.uint8, "r"))
        except ValidationError as error:
            raise ValueError(f"is no safetensors file ({first_problem(error)})") from error
        except (struct.error, ValueError) as error:
            raise ValueError(f"is no safetensors file ({error})") from error


def _mapped(whole: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    (length,) = _LENGTH.unpack(whole[: _LENGTH.size].tobytes())
    if length > min(MOST_BYTES, len(whole) - _LENGTH.size):
        raise ValueError(f"its header claims {length:,} bytes")
    described = parse_json(whole[_LENGTH.size : _LENGTH.size + length].tobytes(), unique_keys=True)
    values = whole[_LENGTH.size + length :]
    if isinstance(described, dict):
        _METADATA.validate_python(described.pop("__metadata__", None), strict=True)
    arrays: dict[str, NDArray[Any]] = {}
    position = 0
    for name, entry in sorted(_ENTRIES.validate_python(described).items(), key=lambda item: item[1].data_offsets):
        arrays[name] = _array(values, position, name, entry)
        position = entry.data_offsets[1]
    if position != len(values):
        raise ValueError(f"its arrays have {position:,} bytes, and {len(values):,} follow the header")
    return arrays


def _array(values: NDArray[np.uint8], position: int, name: str, entry: _Entry) -> NDArray[Any]:
    """Return one array, which has to begin where the one before it ends: arrays that overlap would be read, and with wrong numbers."""
    start, stop = entry.data_offsets
    dtype = _NUMPY_TYPES.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name[:100]!r} has the type {entry.dtype[:100]!r}; known are {', '.join(_NUMPY_TYPES)}")
    if start != position or stop - start != math.prod(entry.shape) * np.dtype(dtype).itemsize or stop > len(values):
        raise ValueError(
            f"{name[:100]!r} claims to be {entry.dtype} of the shape {entry.shape} in the bytes {start:,} to {stop:,} of {len(values):,}, "
            f"where the array before it ends at {position:,}"
        )
    return np.ndarray(entry.shape, dtype, buffer=values[start:stop].data)
