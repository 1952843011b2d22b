"""``manifest.json`` of a prepared store, and verification of the store's files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...core.bounded_json import UnreadableError, first_problem, open_regular, read_json
from ...core.console import is_text, spelled
from ...core.drafts import replacing
from ..base import IMAGE, LABEL, MAX_ATTACHMENT_BYTES, MAX_CLASSES, DataInfo, ImageFeatures, Split
from ..columns import ColumnSpec
from ..features import Features, features_from, features_problem
from ..preprocessing import statistics_problem

SCHEMA = 2
MANIFEST = "manifest.json"
STAMP = "verified.json"
SPLITS: tuple[Split, ...] = ("train", "test")
FILES: Mapping[tuple[Split, str], str] = {(split, kind): f"{split}_{kind}.npy" for split in SPLITS for kind in ("images", "labels")}
ColumnFiles = Mapping[tuple[Split, str], tuple[str, str | None]]  # by split and column: its values, and offsets if its length varies
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
    """A store of labelled images.

    `left_out`: skipped originals with reasons, `notes`: unexpected changes of the data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_number: int = Field(SCHEMA, alias="schema")
    name: str
    version: int
    data_dir: str | None
    input_shape: tuple[Size, Size, Size]
    classes: Annotated[int, Field(ge=1, le=MAX_CLASSES)]
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
        if problem := statistics_problem(self.mean, self.std, self.input_shape[0]):
            raise ValueError(problem)
        if self.class_names and len(self.class_names) != self.classes:
            raise ValueError(f"class_names: {len(self.class_names)} names for {self.classes} classes")
        _refuse_unwritable(self.class_names)
        return self

    def info(self) -> DataInfo:
        """Return the part that models and backends need."""
        features = ImageFeatures(self.input_shape, self.classes, self.mean, self.std, self.flippable, self.class_names)
        return DataInfo.of_images(self.name, dict(self.sizes), features, self.synthetic)

    @property
    def column_files(self) -> ColumnFiles:
        """Names of the array files."""
        kinds = {IMAGE: "images", LABEL: "labels"}
        return {(split, column): (FILES[split, kind], None) for split in SPLITS for column, kind in kinds.items()}

    @property
    def every_file(self) -> Mapping[str, StoredFile]:
        """All files except the manifest, by name."""
        return self.files


def _refuse_unwritable(class_names: Sequence[str]) -> None:
    if wrong := [spelled(name) for name in class_names if not is_text(name)]:
        raise ValueError(f"class_names: not in UTF-8: {', '.join(wrong[:10])}")


class ColumnEntry(BaseModel):
    """One column: see `ColumnSpec`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(max_length=100)]
    dtype: str
    shape: Annotated[tuple[Size | None, ...], Field(max_length=8)]

    def spec(self) -> ColumnSpec:
        """Return the column's spec. Raises ValueError for an invalid one."""
        return ColumnSpec(self.name, self.dtype, self.shape)


class ColumnManifest(BaseModel):
    """Description of a store of columns; see `Manifest`, and the features of text and tables.

    `mean` and `std` are those of a table, and None for text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_number: int = Field(SCHEMA, alias="schema")
    name: str
    version: int
    data_dir: str | None
    columns: Annotated[tuple[ColumnEntry, ...], Field(min_length=1, max_length=100)]
    vocabulary_sizes: dict[str, Annotated[int, Field(ge=1, le=MAX_CLASSES)]] = {}
    sizes: dict[Split, Size]
    synthetic: bool
    target: str = ""
    classes: Annotated[int, Field(ge=0, le=MAX_CLASSES)] = 0
    class_names: tuple[str, ...] = ()
    mean: dict[str, tuple[Number, ...]] | None = None
    std: dict[str, tuple[Number, ...]] | None = None
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
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std: one of them is missing")
        if problem := features_problem([entry.spec() for entry in self.columns], self.features):
            raise ValueError(problem)
        _refuse_unwritable(self.class_names)
        for name, entry in self.attachments.items():
            if problem := attachment_problem(name, entry.bytes):
                raise ValueError(f"attachments: {problem}")
        return self

    @property
    def features(self) -> Features:
        """The features of the columns."""
        return features_from({name: getattr(self, name) for name in (*_FEATURES, "vocabulary_sizes", "languages", "bleu_tokenizer")})

    def info(self) -> DataInfo:
        """Return the part that models and backends need."""
        columns = tuple(entry.spec() for entry in self.columns)
        return DataInfo(self.name, dict(self.sizes), columns, self.features, self.synthetic)

    @property
    def column_files(self) -> ColumnFiles:
        """Names of the array files."""
        varying = {entry.name: entry.spec().varies for entry in self.columns}
        return {
            (split, name): (values_file(split, name), offsets_file(split, name) if varies else None)
            for split in SPLITS
            for name, varies in varying.items()
        }

    @property
    def every_file(self) -> Mapping[str, StoredFile]:
        """All files except the manifest, by name."""
        return {**self.files, **self.attachments}


StoreManifest = Manifest | ColumnManifest
_FEATURES = ("target", "classes", "class_names", "mean", "std")  # of stores of columns that earlier releases do not know


def values_file(split: Split, column: str) -> str:
    """Return the name of the file with a column's values."""
    return f"{split}.{column}.values.npy"


def offsets_file(split: Split, column: str) -> str:
    """Return the name of the file with the offsets of a column of varying length."""
    return f"{split}.{column}.offsets.npy"


def attachment_problem(name: str, size: int) -> str | None:
    """Return why a store cannot have an attachment of this name and size, or None."""
    if not _ATTACHMENT_NAME.fullmatch(name) or name.endswith(".npy") or name in (MANIFEST, STAMP):
        return f"{name[:100]!r} is no name for one"
    return f"{name} has {size} bytes, more than {MAX_ATTACHMENT_BYTES}" if size > MAX_ATTACHMENT_BYTES else None


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open_regular(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: StoreManifest) -> None:
    """Write ``manifest.json`` with its own digest in it."""
    fields = manifest.model_dump(mode="json", by_alias=True)
    unused = {"notes"} if isinstance(manifest, Manifest) or manifest.features.target else {"notes", *_FEATURES}
    fields = {name: value for name, value in fields.items() if value or name not in unused}  # for earlier releases
    (folder / MANIFEST).write_text(json.dumps({**fields, _SELF: json_digest(fields)}, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> StoreManifest:
    """Read ``manifest.json``. Raises ValueError if it is missing, unreadable or altered."""
    try:
        fields = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError("is missing") from error
    if not isinstance(fields, dict) or _SELF not in fields:
        raise ValueError(f"has no {_SELF}")
    stated = fields.pop(_SELF)
    if stated != json_digest(fields):
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
    if set(manifest.files) != (expected := {name for names in manifest.column_files.values() for name in names if name is not None}):
        raise ValueError(f"lists the files {', '.join(sorted(manifest.files))} instead of {', '.join(sorted(expected))}")
    return manifest


def json_digest(fields: Mapping[str, Any]) -> str:
    """Return the sha256 of the fields' canonical JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# The stamp file has the identity of files with verified digests; only ``trainer data verify`` finds changes below the file system.

_SETTLED_SECONDS = 0.1
"""Younger files are not stamped: a later change within one tick of the file system's clock (4 ms on Linux) would be invisible."""

Identity = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The check of one file.

    `problem` is None if it matches the manifest, `bytes` if it is missing.
    """

    name: str
    bytes: int | None
    problem: str | None


def check_sizes(folder: Path, manifest: StoreManifest) -> list[FileCheck]:
    """Compare existence and size of every file with the manifest."""
    checks: list[FileCheck] = []
    for name, entry in manifest.every_file.items():
        try:
            with open_regular(folder / name) as file:
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            checks.append(FileCheck(name, None, "is missing"))
            continue
        except UnreadableError as error:
            checks.append(FileCheck(name, None, str(error)))
            continue
        checks.append(FileCheck(name, size, None if size == entry.bytes else f"has {size} bytes instead of {entry.bytes}"))
    return checks


def check_digests(folder: Path, manifest: StoreManifest) -> list[FileCheck]:
    """Compare the content of every file with the manifest."""
    return [
        check
        if check.problem or file_sha256(folder / check.name) == manifest.every_file[check.name].sha256
        else FileCheck(check.name, check.bytes, "differs from its sha256")
        for check in check_sizes(folder, manifest)
    ]


def identity(folder: Path, manifest: StoreManifest) -> Identity:
    """Return size, inode, and times of change of content and status of each file."""
    identities: Identity = {}
    for name in (*manifest.every_file, MANIFEST):
        status = (folder / name).stat()
        identities[name] = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    return identities


def digests_verified(folder: Path, now: Identity) -> bool:
    """Return whether the stamp confirms verified digests of exactly these files."""
    try:
        stamp = read_json(folder / STAMP)
    except (FileNotFoundError, UnreadableError):  # no stamp or a torn one: compute the digests
        return False
    return bool(stamp == now)


def write_stamp(folder: Path, verified: Mapping[str, list[int]]) -> None:
    """Stamp files as verified; `verified`: their identity before.

    Without write access every open computes the digests.
    """
    youngest = max(times[-1] for times in verified.values())
    if time.time_ns() - youngest < _SETTLED_SECONDS * 1e9 or not os.access(folder, os.W_OK) or (folder / STAMP).is_dir():
        return
    with replacing(folder / STAMP) as draft:
        draft.write_text(json.dumps(verified), encoding="utf-8")
