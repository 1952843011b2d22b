"""``manifest.json``: what a prepared store holds, with a digest of every file and of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .base import DataInfo, Split

__all__ = ["FILES", "MANIFEST", "SCHEMA", "SPLITS", "FileEntry", "Manifest", "file_sha256", "read_manifest", "write_manifest"]

SCHEMA = 2
MANIFEST = "manifest.json"
SPLITS: tuple[Split, ...] = ("train", "test")
FILES: Mapping[tuple[Split, str], str] = {(split, kind): f"{split}_{kind}.npy" for split in SPLITS for kind in ("images", "labels")}
_SELF = "manifest_sha256"


class FileEntry(BaseModel):
    """One array file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]


class Manifest(BaseModel):
    """The whole description of a store. `mean`, `std`, `synthetic` and `flippable` as in `DataInfo`.

    `data_dir` is where the originals came from; `left_out` names those of them that are not in the store, each with the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_number: int = Field(SCHEMA, alias="schema")
    name: str
    version: int
    data_dir: str | None
    input_shape: tuple[int, int, int]
    classes: int
    sizes: dict[Split, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool
    flippable: bool = True
    class_names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: dict[str, FileEntry]

    def info(self) -> DataInfo:
        """Return the part that models and backends need."""
        return DataInfo(
            self.name,
            self.input_shape,
            self.classes,
            dict(self.sizes),
            self.mean,
            self.std,
            self.synthetic,
            self.flippable,
            self.class_names,
        )

    @property
    def total_bytes(self) -> int:
        """Size of all array files together."""
        return sum(entry.bytes for entry in self.files.values())


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with its own digest in it."""
    fields = manifest.model_dump(mode="json", by_alias=True)
    (folder / MANIFEST).write_text(json.dumps({**fields, _SELF: _digest(fields)}, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json``. Raises ValueError, saying what is wrong with it, where it is missing, unreadable or was altered."""
    try:
        fields = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise ValueError("is missing") from error
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(fields, dict) or _SELF not in fields:
        raise ValueError(f"has no {_SELF}")
    stated = fields.pop(_SELF)
    if stated != _digest(fields):
        raise ValueError("differs from its own sha256")
    if fields.get("schema") != SCHEMA:
        raise ValueError(f"has schema {fields.get('schema')!r}; this version reads {SCHEMA}")
    manifest = Manifest.model_validate(fields)
    if set(manifest.files) != set(FILES.values()):
        raise ValueError(f"lists the files {', '.join(sorted(manifest.files))} instead of {', '.join(sorted(FILES.values()))}")
    return manifest


def _digest(fields: Mapping[str, Any]) -> str:
    """Digest the canonical JSON of every field but the digest itself."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
