"""The safetensors format, written as a stream and read as a map.

A file is a little-endian 64-bit length, a JSON header of that length (name → dtype, shape, offsets), and the arrays' bytes in the order
of the header (https://huggingface.co/docs/safetensors). Its own library writes whole arrays only; a checkpoint's come in pieces.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.untrusted.bounded_json import MOST_BYTES, open_regular, parse_json

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


def map_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return a file's arrays by name, in file order, as read-only maps: what is not looked at is not read.

    Raises ValueError, saying what is wrong, where the file is not of the format.
    """
    with open_regular(path) as file:
        whole: NDArray[np.uint8] = np.memmap(file, np.uint8, "r")
    try:
        (length,) = _LENGTH.unpack(whole[: _LENGTH.size].tobytes())
        if length > MOST_BYTES:
            raise ValueError(f"its header is said to have {length:,} bytes")
        described = parse_json(whole[_LENGTH.size : _LENGTH.size + length].tobytes())
        values = whole[_LENGTH.size + length :]
        described.pop("__metadata__", None)
        return {name: _array(values, **entry) for name, entry in described.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"is no safetensors file ({error})") from error


def _array(values: NDArray[np.uint8], dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> NDArray[Any]:
    start, stop = data_offsets
    return np.ndarray(shape, _NUMPY_TYPES[dtype], buffer=values[start:stop].data)
