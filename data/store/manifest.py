"""``manifest.json``: what a prepared store holds, with a digest of every file and of itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core.untrusted.bounded_json import first_problem, open_regular, read_json
from ...core.untrusted.path_names import is_text, spelled
from ..base import MOST_ATTACHMENT_BYTES, MOST_CLASSES, DataInfo, Split, TextFeatures
from ..columns import ColumnSpec
from ..normalisation import wrong_statistics

__all__ = [
    "FILES",
    "MANIFEST",
    "SCHEMA",
    "SPLITS",
    "STAMP",
    "ColumnEntry",
    "ColumnManifest",
    "FileEntry",
    "Manifest",
    "StoreManifest",
    "StoredFile",
    "file_sha256",
    "offsets_file",
    "read_manifest",
    "values_file",
    "write_manifest",
    "wrong_attachment",
]

SCHEMA = 2
MANIFEST = "manifest.json"
STAMP = "verified.json"
SPLITS: tuple[Split, ...] = ("train", "test")
FILES: Mapping[tuple[Split, str], str] = {(split, kind): f"{split}_{kind}.npy" for split in SPLITS for kind in ("images", "labels")}
_SELF = "manifest_sha256"


Size = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
_ATTACHMENT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


class StoredFile(BaseModel):
    """One file of a store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    bytes: int = Field(ge=0, lt=2**63)


class FileEntry(StoredFile):
    """One array file."""

    dtype: str
    shape: tuple[Size, ...]


class Manifest(BaseModel):
    """The whole description of a store of images with a class each. `mean`, `std`, `synthetic` and `flippable` as in `DataInfo`.

    `data_dir` is where the originals came from; `left_out` names those of them that are not in the store, each with the reason. `notes`
    says what was done to the data that a user may not expect; it is written only where there is something to say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_number: int = Field(SCHEMA, alias="schema")
    name: str
    version: int
    data_dir: str | None
    input_shape: tuple[Size, Size, Size]
    classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    sizes: dict[Split, Size]
    mean: tuple[Number, ...]
    std: tuple[Number, ...]
    synthetic: bool
    flippable: bool = True
    class_names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[str, FileEntry]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if problem := wrong_statistics(self.mean, self.std, self.input_shape[0]):
            raise ValueError(problem)
        if self.class_names and len(self.class_names) != self.classes:
            raise ValueError(f"class_names: {len(self.class_names)} names for {self.classes} classes")
        if wrong := [spelled(name) for name in self.class_names if not is_text(name)]:
            raise ValueError(f"class_names: not in UTF-8: {', '.join(wrong[:10])}")
        return self

    def info(self) -> DataInfo:
        """Return the part that models and backends need."""
        return DataInfo.of_images(
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
    def expected_files(self) -> set[str]:
        """The names of the array files that belong to such a store."""
        return set(FILES.values())

    @property
    def every_file(self) -> Mapping[str, StoredFile]:
        """All files but the manifest, by name."""
        return self.files

    @property
    def total_bytes(self) -> int:
        """Size of all array files together."""
        return sum(entry.bytes for entry in self.files.values())


class ColumnEntry(BaseModel):
    """One column: see `ColumnSpec`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(max_length=100)]
    dtype: str
    shape: Annotated[tuple[Size | None, ...], Field(max_length=8)]

    def spec(self) -> ColumnSpec:
        """Return the column's shape. Raises ValueError where it is none."""
        return ColumnSpec(self.name, self.dtype, self.shape)


class ColumnManifest(BaseModel):
    """The whole description of a store of columns; see `Manifest` and `TextFeatures`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_number: int = Field(SCHEMA, alias="schema")
    name: str
    version: int
    data_dir: str | None
    columns: Annotated[tuple[ColumnEntry, ...], Field(min_length=1, max_length=100)]
    vocabulary_sizes: dict[str, Annotated[int, Field(ge=1, le=MOST_CLASSES)]]
    sizes: dict[Split, Size]
    synthetic: bool
    languages: Annotated[tuple[Word, ...], Field(max_length=10)] = ()
    bleu_tokenizer: Word = "13a"
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[str, FileEntry]
    attachments: Annotated[dict[str, StoredFile], Field(max_length=100)] = {}

    @model_validator(mode="after")
    def _sound(self) -> Self:
        names = [entry.spec().name for entry in self.columns]
        if len(set(names)) != len(names) or not set(self.vocabulary_sizes) <= set(names):
            raise ValueError("columns: names repeat, or a vocabulary belongs to none of them")
        for name, entry in self.attachments.items():
            if problem := wrong_attachment(name, entry.bytes):
                raise ValueError(f"attachments: {problem}")
        return self

    def info(self) -> DataInfo:
        """Return the part that models and backends need."""
        columns = tuple(entry.spec() for entry in self.columns)
        features = TextFeatures(dict(self.vocabulary_sizes), self.languages, self.bleu_tokenizer)
        return DataInfo(self.name, dict(self.sizes), columns, features, self.synthetic)

    @property
    def expected_files(self) -> set[str]:
        """The names of the array files that belong to such a store."""
        names = {values_file(split, entry.name) for split in SPLITS for entry in self.columns}
        return names | {offsets_file(split, entry.name) for split in SPLITS for entry in self.columns if entry.spec().varies}

    @property
    def every_file(self) -> Mapping[str, StoredFile]:
        """All files but the manifest, by name."""
        return {**self.files, **self.attachments}

    @property
    def total_bytes(self) -> int:
        """Size of all array files and attachments together."""
        return sum(entry.bytes for entry in self.every_file.values())


StoreManifest = Manifest | ColumnManifest


def values_file(split: Split, column: str) -> str:
    """Return the name of the file with a column's values."""
    return f"{split}.{column}.values.npy"


def offsets_file(split: Split, column: str) -> str:
    """Return the name of the file that says where each example of a column begins; only where its length varies."""
    return f"{split}.{column}.offsets.npy"


def wrong_attachment(name: str, size: int) -> str | None:
    """Return why a store cannot have an attachment of this name and size, or None: it lies beside the arrays, under its own name."""
    if not _ATTACHMENT_NAME.fullmatch(name) or name.endswith(".npy") or name in (MANIFEST, STAMP):
        return f"{name[:100]!r} is no name for one"
    return f"{name} has {size} bytes, more than {MOST_ATTACHMENT_BYTES}" if size > MOST_ATTACHMENT_BYTES else None


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open_regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: StoreManifest) -> None:
    """Write ``manifest.json`` with its own digest in it."""
    fields = manifest.model_dump(mode="json", by_alias=True, exclude=None if manifest.notes else {"notes"})  # earlier releases refuse it
    (folder / MANIFEST).write_text(json.dumps({**fields, _SELF: _digest(fields)}, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> StoreManifest:
    """Read ``manifest.json``. Raises ValueError, saying what is wrong with it, where it is missing, unreadable or was altered."""
    try:
        fields = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError("is missing") from error
    if not isinstance(fields, dict) or _SELF not in fields:
        raise ValueError(f"has no {_SELF}")
    stated = fields.pop(_SELF)
    if stated != _digest(fields):
        raise ValueError("differs from its own sha256")
    if fields.get("schema") != SCHEMA:
        raise ValueError(f"has schema {fields.get('schema')!r}; this version reads {SCHEMA}")
    try:
        manifest = (ColumnManifest if "columns" in fields else Manifest).model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    if set(manifest.sizes) != set(SPLITS):
        raise ValueError(f"has sizes of {', '.join(manifest.sizes) or 'no split'} instead of {', '.join(SPLITS)}")
    if empty := [split for split, size in manifest.sizes.items() if not size]:
        raise ValueError(f"has no {' and no '.join(empty)} example")
    if set(manifest.files) != manifest.expected_files:
        raise ValueError(f"lists the files {', '.join(sorted(manifest.files))} instead of {', '.join(sorted(manifest.expected_files))}")
    return manifest


def _digest(fields: Mapping[str, Any]) -> str:
    """Digest the canonical JSON of every field but the digest itself."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
