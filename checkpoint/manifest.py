"""``manifest.json``: the size and digest of every file of a checkpoint, and its own digest.

The digest of a file tells damage, not malice, as whoever can alter a file can alter its manifest. It is XXH3-128 (xxhash.com), which
takes a tenth of the time of sha256, on a processor that trains meanwhile; ``xxh128sum`` prints it. Schema 1 had sha256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from ..core.untrusted.bounded_json import JsonObject, first_problem, open_regular, read_json
from ..core.untrusted.path_names import UnsafeNameError, is_plain_name

__all__ = ["MANIFEST", "FileDigest", "Hasher", "digest_of", "new_hasher", "read_manifest", "write_manifest"]

MANIFEST = "manifest.json"
ALGORITHM = "xxh3_128"
_SCHEMA = 2
_ALGORITHMS = {1: "sha256", _SCHEMA: ALGORITHM}
"""Which digest the manifests of each schema have."""

_SELF = "manifest_sha256"


class _File(JsonObject):
    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: str = ""
    xxh3_128: str = ""


_FILES = TypeAdapter(dict[str, _File])


class Hasher(Protocol):
    """A digest on its way."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        ...


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What one file was when it was written: its size, and its digest by `algorithm`."""

    bytes: int
    digest: str
    algorithm: str = ALGORITHM


def new_hasher(algorithm: str = ALGORITHM) -> Hasher:
    """Return the hasher of a manifest's algorithm."""
    return cast(Hasher, xxhash.xxh3_128() if algorithm == ALGORITHM else hashlib.new(algorithm))


def digest_of(path: Path, algorithm: str = ALGORITHM) -> FileDigest:
    """Return a file's size and digest as they are now. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, lambda: new_hasher(algorithm)).hexdigest()  # type: ignore[arg-type, return-value]
        return FileDigest(file.tell(), digest, algorithm)


def write_manifest(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest of a folder's files."""
    fields = {"schema": _SCHEMA, "files": {name: {"bytes": file.bytes, ALGORITHM: file.digest} for name, file in files.items()}}
    (folder / MANIFEST).write_text(json.dumps({**fields, _SELF: _own_digest(fields)}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Return the files that the manifest lists. Raises ValueError, saying what is wrong with it, where it is torn, altered or missing."""
    try:
        fields = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError("is missing") from error
    if not isinstance(fields, dict) or fields.pop(_SELF, None) != _own_digest(fields):
        raise ValueError("differs from its own sha256")
    found = fields.get("schema")
    if not isinstance(found, int) or found not in _ALGORITHMS:
        raise ValueError(f"has schema {found!r}; this release reads {' and '.join(map(str, _ALGORITHMS))}")
    algorithm = _ALGORITHMS[found]
    try:
        files = _FILES.validate_python(fields.get("files"))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    for name in files:
        if not is_plain_name(name):
            raise ValueError(f"lists {UnsafeNameError(name)!s}, which is no file of a checkpoint")
    return {name: FileDigest(file.bytes, getattr(file, algorithm), algorithm) for name, file in files.items()}


def _own_digest(fields: Mapping[str, Any]) -> str:
    """Digest the canonical JSON of every field but the digest itself."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
