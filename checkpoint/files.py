"""Checkpoint files: the manifest with sizes and digests, and the safetensors format.

The digest detects damage, not malice. XXH3-128 (xxhash.com) takes a tenth of the time of sha256, on a processor that also trains;
``xxh128sum`` prints it. Schema 1 had sha256.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from ..core.bounded_json import MAX_BYTES, JsonObject, first_problem, open_regular, parse_json, read_json
from ..core.console import UnsafeNameError, is_plain_name
from ..data.store.manifest import json_digest

MANIFEST = "manifest.json"
ALGORITHM = "xxh3_128"
_SCHEMA = 2
_ALGORITHMS = {1: "sha256", _SCHEMA: ALGORITHM}  # by schema
_SELF = "manifest_sha256"


class _File(JsonObject):
    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: str = ""
    xxh3_128: str = ""


_FILES = TypeAdapter(dict[str, _File])


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size of a file when it was written, and its digest by `algorithm`."""

    bytes: int
    digest: str
    algorithm: str = ALGORITHM


def new_hasher(algorithm: str = ALGORITHM) -> hashlib._Hash:
    """Return a hasher for a manifest's algorithm."""
    return cast("hashlib._Hash", xxhash.xxh3_128() if algorithm == ALGORITHM else hashlib.new(algorithm))


def digest_of(path: Path, algorithm: str = ALGORITHM) -> FileDigest:
    """Return a file's current size and digest. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, lambda: new_hasher(algorithm)).hexdigest()
        return FileDigest(file.tell(), digest, algorithm)


def write_manifest(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest of a folder's files."""
    fields = {"schema": _SCHEMA, "files": {name: {"bytes": file.bytes, ALGORITHM: file.digest} for name, file in files.items()}}
    (folder / MANIFEST).write_text(json.dumps({**fields, _SELF: json_digest(fields)}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Return the files that the manifest lists.

    Raises ValueError if it is missing, torn or altered.
    """
    try:
        fields = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError("is missing") from error
    if not isinstance(fields, dict) or fields.pop(_SELF, None) != json_digest(fields):
        raise ValueError("differs from its own sha256")
    schema = fields.get("schema")
    if not isinstance(schema, int) or schema not in _ALGORITHMS:
        raise ValueError(f"has schema {schema!r}; this release reads {' and '.join(map(str, _ALGORITHMS))}")
    algorithm = _ALGORITHMS[schema]
    try:
        files = _FILES.validate_python(fields.get("files"))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    for name in files:
        if not is_plain_name(name):
            raise ValueError(f"lists {UnsafeNameError(name)!s}, which is no file of a checkpoint")
    return {name: FileDigest(file.bytes, getattr(file, algorithm), algorithm) for name, file in files.items()}


BF16 = "|V2"  # numpy has no such type: the bytes of each number

# Its own library (https://huggingface.co/docs/safetensors) writes whole arrays only; a checkpoint's arrive in pieces.

_TYPES = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<u4": "U32", "<i4": "I32", "<u8": "U64", "<i8": "I64",
    "<f2": "F16", "<f4": "F32", "<f8": "F64",
}  # fmt: skip
_NUMPY_TYPES = {name: dtype for dtype, name in _TYPES.items()} | {"BF16": BF16}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


def header(arrays: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the safetensors header of arrays: (name, numpy type, shape, size in bytes).

    Raises ValueError for an unsupported type or repeated name.
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
    dtype: str
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)]  # numpy has no more dimensions
    data_offsets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


_ENTRIES = TypeAdapter(dict[str, _Entry])
_METADATA = TypeAdapter(dict[str, str] | None)


def map_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return read-only maps of a file's arrays by name, in file order.

    Raises ValueError unless each byte is in exactly one.
    """
    with open_regular(path) as file:
        try:
            whole = np.memmap(file, np.uint8, "r")
        except ValueError as error:  # an empty file
            raise ValueError(f"is no safetensors file ({error})") from error
        arrays = arrays_in(whole)
    if strange := next((name for name, array in arrays.items() if array.dtype.str == BF16), None):
        raise ValueError(f"is no safetensors file ({strange[:100]!r} has the type BF16; known are {', '.join(_TYPES.values())})")
    return arrays


def arrays_in(whole: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file's content by name, on its memory; also those of `BF16`."""
    try:
        return _parse_arrays(whole)
    except ValidationError as error:
        raise ValueError(f"is no safetensors file ({first_problem(error)})") from error
    except (struct.error, ValueError) as error:
        raise ValueError(f"is no safetensors file ({error})") from error


def _parse_arrays(whole: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    (length,) = _LENGTH.unpack(whole[: _LENGTH.size].tobytes())
    if length > min(MAX_BYTES, len(whole) - _LENGTH.size):
        raise ValueError(f"its header claims {length:,} bytes")
    described = parse_json(whole[_LENGTH.size : _LENGTH.size + length].tobytes(), unique_keys=True)
    values = whole[_LENGTH.size + length :]
    if isinstance(described, dict):
        _METADATA.validate_python(described.pop("__metadata__", None), strict=True)
    arrays: dict[str, NDArray[Any]] = {}
    position = 0
    for name, entry in sorted(_ENTRIES.validate_python(described).items(), key=lambda item: item[1].data_offsets):
        arrays[name] = _parse_array(values, position, name, entry)
        position = entry.data_offsets[1]
    if position != len(values):
        raise ValueError(f"its arrays have {position:,} bytes, and {len(values):,} follow the header")
    return arrays


def _parse_array(values: NDArray[np.uint8], position: int, name: str, entry: _Entry) -> NDArray[Any]:
    """Return one array, which must begin where the previous one ends, so that none overlap."""
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
