"""Opened stores: datasets as read-only .npy files plus a manifest, which all backends map.

dataset = open_dataset("digits")            # prepared on first use
x_nchw, y_n = dataset.inputs("train"), dataset.labels("train")
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ...core.bounded_json import open_regular
from ...core.errors import DamagedStoreError, TrainerError, UsageError
from ..base import IMAGE, LABEL, DataInfo, ImageFeatures, Split, TableFeatures
from ..columns import TOKENS, Column
from ..features import values_problem
from ..preprocessing import normal_table
from ..text import END
from .build import build_store
from .location import cache_root, resolve, store_key, stores_of
from .manifest import (
    MANIFEST,
    SPLITS,
    ColumnManifest,
    FileCheck,
    Manifest,
    StoredFile,
    StoreManifest,
    check_digests,
    check_sizes,
    digests_verified,
    file_sha256,
    identity,
    read_manifest,
    write_stamp,
)

_PART = 1 << 23  # elements of a map examined at a time
_CHUNK = 512  # images per step: keeps the work area (8 bytes a pixel) in the processor's cache


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """An opened store, identified by `digest`, the manifest's sha256.

    `made_seconds`: time to build it, 0 if it existed.
    """

    info: DataInfo
    path: Path
    digest: str
    left_out: tuple[str, ...]
    _columns: Mapping[tuple[Split, str], Column]
    _attachments: Mapping[str, StoredFile] = field(default_factory=dict)
    made_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def column(self, split: Split, name: str) -> Column:
        """Return a column as stored, as read-only maps. Raises UsageError for an unknown name."""
        self.info.column(name)
        return self._columns[split, name]

    def weights(self, split: Split, name: str) -> NDArray[np.int64]:
        """Return each example's weight in a sum; see `Dataset.weights`."""
        if name == "examples":
            return np.ones(self.info.sizes[split], dtype=np.int64)
        counted = {column.name + TOKENS: column.name for column in self.info.columns if column.varies}
        if name not in counted:
            raise UsageError(f"data: {self.info.name!r} has no weights called {name!r}; it has {', '.join(['examples', *counted])}.")
        return self._columns[split, counted[name]].lengths

    @property
    def attachments(self) -> tuple[str, ...]:
        """Names of the attached files."""
        return tuple(self._attachments)

    def attachment(self, name: str) -> bytes:
        """Return an attached file.

        Raises UsageError for an unknown name, DamagedStoreError if it has changed.
        """
        if name not in self._attachments:
            names = ", ".join(self._attachments) or "none"
            raise UsageError(f"data: {self.info.name!r} has no attachment {name!r}; it has {names}.")
        entry = self._attachments[name]
        with open_regular(self.path / name) as file:
            content = file.read(entry.bytes + 1)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise _damage_error(self.path, self.info.name, None, [FileCheck(name, len(content), "differs from its sha256")])
        return content

    def normalised_as(self, mean: Any, std: Any) -> StoredDataset:
        """Return the same examples with another `DataInfo.normalisation`."""
        if isinstance(self.info.features, TableFeatures):
            statistics: dict[str, Any] = {"mean": {name: tuple(values) for name, values in mean.items()}}
            statistics["std"] = {name: tuple(values) for name, values in std.items()}
        else:
            statistics = {"mean": tuple(mean), "std": tuple(std)}
        return replace(self, info=replace(self.info, features=replace(self.info.features, **statistics)))

    def images(self, split: Split) -> NDArray[np.uint8]:
        """Return the images, uint8 [n, c, h, w], a read-only map; in memory they are channels last."""
        return self.column(split, IMAGE).values.view(np.uint8)

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels, int64 [n], a read-only map."""
        return self.column(split, LABEL).values.view(np.int64)

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the normalised images, float32 [n, c, h, w].

        A table gives the same bits everywhere.
        """
        images = self.images(split)
        result = np.empty(images.shape, dtype=np.float32)
        for channel, table in enumerate(normal_table(self.info.mean, self.info.std)):
            for start in range(0, len(images), _CHUNK):
                np.take(table, images[start : start + _CHUNK, channel], out=result[start : start + _CHUNK, channel], mode="clip")
        return result


def placeholder_text(info: DataInfo) -> StoredDataset:
    """Return a text with the columns of another, and one example per split: END alone, or zeros.

    Raises UsageError for other data.
    """
    _ = info.text
    columns: dict[tuple[Split, str], Column] = {}
    for spec in info.columns:
        values = np.full((1, *spec.fixed_shape), END if spec.varies else 0, spec.dtype)
        column = Column(values, np.array([0, 1]) if spec.varies else None)
        columns |= {(split, spec.name): column for split in SPLITS}
    return StoredDataset(replace(info, sizes={"train": 1, "test": 1}), Path(), "", (), columns)


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The result of `verify` for one store."""

    name: str
    path: str
    files: tuple[FileCheck, ...]

    @property
    def damaged(self) -> tuple[FileCheck, ...]:
        """The files with a problem."""
        return tuple(check for check in self.files if check.problem)

    @property
    def remedy(self) -> str:
        """The command that builds the store again."""
        return _remedy(self.name, _data_dir_of(Path(self.path)))


def open_dataset(name: str, data_dir: Path | None = None, *, verify: Literal["changed", "always"] = "changed") -> StoredDataset:
    """Open a dataset's store, building it first if there is none.

    Sizes, shapes and the manifest are always checked; digests if a file has changed since they were verified, or ``always``. Raises
    UsageError for an unknown name or missing originals, DamagedStoreError naming the damaged file.
    """
    resolved = resolve(name, data_dir)
    key = store_key(resolved)
    folder = cache_root() / key
    if folder.exists():
        return _open(folder, name, data_dir, always=verify == "always")
    began = time.monotonic()
    build_store(cache_root(), key, resolved.name, resolved.source, resolved.data_dir, again=False)
    made_seconds = time.monotonic() - began
    return replace(_open(folder, name, data_dir, always=verify == "always"), made_seconds=made_seconds)


def prepare(name: str, data_dir: Path | None = None, again: bool = False) -> Path:
    """Build a dataset's store if it is missing or with `again`; return its folder.

    Errors: `open_dataset`.
    """
    resolved = resolve(name, data_dir)
    key = store_key(resolved)
    build_store(cache_root(), key, resolved.name, resolved.source, resolved.data_dir, again=again)
    return cache_root() / key


def verify(name: str) -> list[StoreReport]:
    """Verify the digests of all stores of a dataset.

    Raises UsageError if there is none. A name without arguments matches all arguments.
    """
    resolved = resolve(name)
    folders = stores_of(resolved.name, resolved.source)
    if not folders:
        raise UsageError(f"data: {name!r} is not prepared yet, so there is nothing to verify. Prepare it with: trainer data prepare {name}")
    return [verify_store(resolved.name, folder) for folder in folders]


def _open(folder: Path, name: str, data_dir: Path | None, *, always: bool) -> StoredDataset:
    """Computes digests unless the stamp vouches for the files, or ``always``."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise _damage_error(folder, name, data_dir, [FileCheck(MANIFEST, None, str(error))]) from error
    _expect_sound(check_sizes(folder, manifest), folder, name, data_dir)
    before = identity(folder, manifest)
    changed = always or not digests_verified(folder, before)
    if changed:
        _expect_sound(check_digests(folder, manifest), folder, name, data_dir)
    dataset = _map_columns(folder, manifest, name, data_dir, look_inside=changed)
    if changed:
        write_stamp(folder, before)
    return dataset


def _map_columns(folder: Path, manifest: StoreManifest, name: str, data_dir: Path | None, *, look_inside: bool) -> StoredDataset:
    """Map files, checking the range of classes and tokens if `look_inside`.

    Raises DamagedStoreError for a mismatch.
    """
    arrays = {file: _map(folder, file, manifest, name, data_dir) for file in manifest.files}
    columns: dict[tuple[Split, str], Column] = {}
    for key, (values, offsets) in manifest.column_files.items():
        array = arrays[values].transpose(0, 3, 1, 2) if isinstance(manifest, Manifest) and key[1] == IMAGE else arrays[values]
        columns[key] = Column(array, None if offsets is None else cast("NDArray[np.int64]", arrays[offsets]))
    attachments = manifest.attachments if isinstance(manifest, ColumnManifest) else {}
    info = manifest.info()
    for (split, column), array_column in columns.items():
        problem = array_column.wrong_with(info.column(column))
        if problem is None and len(array_column) != manifest.sizes[split]:
            problem = f"{column} has {len(array_column)} examples instead of {manifest.sizes[split]}"
        if problem is None and look_inside:
            problem = _out_of_range(info, column, array_column)
        if problem is not None:
            raise _damage_error(folder, name, data_dir, [FileCheck(f"split {split}", None, f"is not what the manifest says: {problem}")])
    return StoredDataset(info, folder, file_sha256(folder / MANIFEST), manifest.left_out, columns, attachments, notes=manifest.notes)


def _out_of_range(info: DataInfo, name: str, column: Column) -> str | None:
    features = info.features
    if isinstance(features, ImageFeatures):
        if name == IMAGE:
            return None
        features = TableFeatures(LABEL, features.classes)
    return values_problem(features, name, *_extremes(column.values)) if column.values.size else None


def _extremes(values: NDArray[np.generic]) -> tuple[float, float]:
    """Reads a map in parts, so that none stays in memory."""
    if not isinstance(values, np.memmap) or values.ndim != 1 or values.filename is None:
        return values.min().item(), values.max().item()
    extremes: list[float] = []
    for start in range(0, len(values), _PART):
        shape = (min(_PART, len(values) - start),)
        part = np.memmap(values.filename, values.dtype, "r", values.offset + start * values.itemsize, shape)
        extremes += [part.min().item(), part.max().item()]
    return np.min(extremes).item(), np.max(extremes).item()  # NaN, if there is one


def _map(folder: Path, file: str, manifest: StoreManifest, name: str, data_dir: Path | None) -> NDArray[np.generic]:
    """Map one array read-only. Its header must match the manifest."""
    try:
        array: NDArray[np.generic] = np.load(folder / file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OverflowError, SyntaxError, TokenError) as error:  # numpy parses a header as Python
        raise _damage_error(folder, name, data_dir, [FileCheck(file, None, "is no array file")]) from error
    if not isinstance(array, np.ndarray):  # an archive of several
        raise _damage_error(folder, name, data_dir, [FileCheck(file, None, "is no array file")])
    entry = manifest.files[file]
    if array.shape != entry.shape or str(array.dtype) != entry.dtype:
        difference = f"holds {array.dtype} {list(array.shape)} instead of {entry.dtype} {list(entry.shape)}"
        raise _damage_error(folder, name, data_dir, [FileCheck(file, None, difference)])
    return array


def verify_store(name: str, folder: Path) -> StoreReport:
    """Verify one store's digests and contents.

    `name`: the dataset's, in case the manifest is unreadable.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return StoreReport(name, str(folder), (FileCheck(MANIFEST, None, str(error)),))
    size = (folder / MANIFEST).stat().st_size
    if manifest.name.partition(":")[0] != name.partition(":")[0]:
        return StoreReport(name, str(folder), (FileCheck(MANIFEST, size, f"says that it is of {manifest.name!r}"),))
    manifest_check = FileCheck(MANIFEST, size, None)
    sizes = check_sizes(folder, manifest)
    before = identity(folder, manifest) if not any(check.problem for check in sizes) else None
    checks = check_digests(folder, manifest)
    if before is not None and not any(check.problem for check in checks):
        try:
            _map_columns(folder, manifest, manifest.name, None, look_inside=True)
            write_stamp(folder, before)
        except DamagedStoreError as error:
            checks.append(FileCheck("contents", None, str(error)))
    return StoreReport(manifest.name, str(folder), (manifest_check, *checks))


def _expect_sound(checks: Sequence[FileCheck], folder: Path, name: str, data_dir: Path | None) -> None:
    if any(check.problem for check in checks):
        raise _damage_error(folder, name, data_dir, checks)


def _damage_error(folder: Path, name: str, data_dir: Path | None, checks: Sequence[FileCheck]) -> DamagedStoreError:
    problems = "; ".join(f"{check.name} {check.problem}" for check in checks if check.problem)
    return DamagedStoreError(
        f"data: the store of {name!r} in {str(folder)!r} is damaged: {problems}. Make it again with: {_remedy(name, data_dir)}"
    )


def _remedy(name: str, data_dir: Path | None) -> str:
    originals = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
    return f"trainer data prepare {shlex.quote(name)}{originals} --again"


def _data_dir_of(folder: Path) -> Path | None:
    """Return a store's folder of originals.

    None if it has none, is named by it, or is unreadable.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return None
    try:
        in_name = resolve(manifest.name).folder_in_name
    except TrainerError:
        return None  # an unknown dataset
    return Path(manifest.data_dir) if manifest.data_dir and not in_name else None
