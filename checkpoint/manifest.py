"""``manifest.json``: the size and digest of every file of a checkpoint, and its own digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MANIFEST", "FileDigest", "digest_of", "read_manifest", "write_manifest"]

MANIFEST = "manifest.json"
_SCHEMA = 1
_SELF = "manifest_sha256"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What one file was when it was written."""

    bytes: int
    sha256: str


def digest_of(path: Path) -> FileDigest:
    """Return a file's size and digest as they are now. Raises OSError."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def write_manifest(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest of a folder's files."""
    fields = {"schema": _SCHEMA, "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in files.items()}}
    (folder / MANIFEST).write_text(json.dumps({**fields, _SELF: _own_digest(fields)}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Return the files that the manifest lists. Raises ValueError, saying what is wrong with it, where it is torn, altered or missing."""
    try:
        fields = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise ValueError("is missing") from error
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(fields, dict) or fields.pop(_SELF, None) != _own_digest(fields):
        raise ValueError("differs from its own sha256")
    if fields["schema"] != _SCHEMA:
        raise ValueError(f"has schema {fields['schema']!r}; this release reads {_SCHEMA}")
    return {name: FileDigest(**file) for name, file in fields["files"].items()}


def _own_digest(fields: Mapping[str, Any]) -> str:
    """Digest the canonical JSON of every field but the digest itself."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
