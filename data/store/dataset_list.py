"""Rows of ``trainer data list``: datasets, their stores, and unfinished preparations."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core import plugins
from ...core.bounded_json import UnreadableError, parse_json
from ...core.errors import TrainerError, UsageError
from ..base import DatasetSource, ImageFeatures
from ..columns import ColumnSpec
from ..features import described_features
from .location import cache_root, is_locked, key_pattern, locked, put_aside, resolve, stores_of
from .manifest import MANIFEST, SPLITS, ColumnManifest, Manifest, check_sizes, read_manifest
from .stored_dataset import StoredDataset


@dataclass(frozen=True, slots=True)
class DatasetStatus:
    """A row of ``trainer data list``: a dataset, and one store of it if there is one.

    `data_dir`: original files. `left_out`: skipped originals. `pieces`: size of the vocabulary. `problem`: why the source is unusable, or
    damage visible without digests. `begun`: state of a preparation without a store; `bytes` is then its size so far, and `path` the future
    store.
    """

    name: str
    description: str
    prepared: bool
    version: int | None = None
    train: int | None = None
    test: int | None = None
    classes: int | None = None
    input_shape: tuple[int, int, int] | None = None
    languages: tuple[str, ...] | None = None
    pieces: int | None = None
    synthetic: bool | None = None
    bytes: int | None = None
    path: str | None = None
    data_dir: str | None = None
    left_out: tuple[str, ...] = ()
    problem: str | None = None
    begun: Literal["interrupted", "at work"] | None = None


def list_datasets() -> list[DatasetStatus]:
    """Return a row per store and preparation, and per dataset with neither or a broken source."""
    rows: list[DatasetStatus] = []
    for name in plugins.available("dataset"):
        try:
            source = resolve(name).source
        except TrainerError as error:
            rows.append(DatasetStatus(name, "", prepared=False, problem=str(error)))
            continue
        stores = [_describe_store(name, source, folder) for folder in stores_of(name, source)]
        stores += [_describe_preparation(name, source, preparation) for preparation in preparations_of(name, source)]
        rows += stores or [DatasetStatus(name, source.description, prepared=False, version=source.version)]
    return rows


def _describe_preparation(name: str, source: DatasetSource, preparation: Preparation) -> DatasetStatus:
    begun: Literal["interrupted", "at work"] = "at work" if preparation.at_work else "interrupted"
    path = str(preparation.store)
    return DatasetStatus(name, source.description, prepared=False, version=source.version, bytes=preparation.bytes, path=path, begun=begun)


def _describe_store(name: str, source: DatasetSource, folder: Path) -> DatasetStatus:
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return DatasetStatus(
            name, source.description, prepared=True, version=source.version, path=str(folder), problem=f"{MANIFEST} {error}"
        )
    problems = [f"{check.name} {check.problem}" for check in check_sizes(folder, manifest) if check.problem]
    return DatasetStatus(
        manifest.name,
        source.description,
        prepared=True,
        version=manifest.version,
        train=manifest.sizes["train"],
        test=manifest.sizes["test"],
        classes=manifest.classes or None,
        input_shape=manifest.input_shape if isinstance(manifest, Manifest) else None,
        languages=manifest.languages if isinstance(manifest, ColumnManifest) else None,
        pieces=max(manifest.vocabulary_sizes.values(), default=None) if isinstance(manifest, ColumnManifest) else None,
        synthetic=manifest.synthetic,
        bytes=sum(entry.bytes for entry in manifest.every_file.values()),
        path=str(folder),
        data_dir=manifest.data_dir,
        left_out=manifest.left_out,
        problem="; ".join(problems) or None,
    )


_VOCABULARY = "vocabulary.json"
_TEST_LINES = ("test.source.txt", "test.target.txt")
_TEXT_SOURCES = "packages.json"  # a compiled text's sources and digest, ``pairs_sha256``


def described(dataset: StoredDataset) -> dict[str, Any]:
    """Return the facts about a dataset by name, JSON-ready; lengths are in pieces, END included."""
    info = dataset.info
    facts: dict[str, Any] = {"name": info.name, "examples": dict(info.sizes), "synthetic": info.synthetic}
    if isinstance(info.features, ImageFeatures):
        facts |= {"shape": list(info.input_shape), "classes": info.classes}
        if info.features.class_names:
            facts["class_names"] = list(info.features.class_names)
    else:
        features = described_features(info.features)
        if not info.features.classes:
            features = {name: value for name, value in features.items() if name not in ("classes", "class_names")}
        facts |= {"columns": {column.name: _type_and_shape(column) for column in info.columns}, **features}
        for column in (column for column in info.columns if column.varies):
            for split in SPLITS:
                lengths = dataset.column(split, column.name).lengths
                facts[f"{split}_{column.name}"] = {
                    "tokens": int(lengths.sum()),
                    "mean_length": round(float(lengths.mean()), 2),
                    "median_length": int(np.median(lengths)),
                    "longest": int(lengths.max()),
                }
        if (distinct := distinct_test_pairs(dataset)) is not None:
            facts["distinct_test_pairs"] = distinct
        if (digest := _text_sha256(dataset)) is not None:
            facts["text_sha256"] = digest
        if _VOCABULARY in dataset.attachments:
            facts["vocabulary"] = parse_json(dataset.attachment(_VOCABULARY))
    if info.features.classes:
        counts = {split: np.bincount(dataset.column(split, info.target).values, minlength=info.classes) for split in SPLITS}
        facts["smallest_class_examples"] = {split: int(count.min()) for split, count in counts.items()}
    return {**facts, "left_out": list(dataset.left_out), "notes": list(dataset.notes), "path": str(dataset.path), "digest": dataset.digest}


def _type_and_shape(column: ColumnSpec) -> str:
    sizes = ["any length" if size is None else str(size) for size in column.shape]
    return f"{column.dtype} [{', '.join(sizes)}]" if sizes else column.dtype


def distinct_test_pairs(dataset: StoredDataset) -> int | None:
    """Return the number of distinct sentence pairs in the test split; None for other data."""
    if not set(_TEST_LINES) <= set(dataset.attachments):
        return None
    source, target = (dataset.attachment(name).split(b"\n") for name in _TEST_LINES)
    return len(set(zip(source[:-1], target[:-1], strict=False)))


def _text_sha256(dataset: StoredDataset) -> str | None:
    if _TEXT_SOURCES not in dataset.attachments:
        return None
    with suppress(UnreadableError):  # third-party datasets may have such an attachment
        sources = parse_json(dataset.attachment(_TEXT_SOURCES))
        if isinstance(sources, dict) and isinstance(digest := sources.get("pairs_sha256"), str):
            return digest
    return None


_LEFTOVER = re.compile(r"\.(.+)\.(work|(draft|old)-[^.]+)")  # finished parts, half a store, or one being removed


@dataclass(frozen=True, slots=True)
class Preparation:
    """A preparation without a store; `at_work`: a process holds its lock."""

    store: Path
    bytes: int
    at_work: bool


def preparations_of(name: str, source: DatasetSource, *, any_version: bool = False) -> list[Preparation]:
    """Return a dataset's preparations without a store; arguments as in `location.stores_of`."""
    root, pattern = cache_root(), key_pattern(name, source, any_version=any_version)
    matches = (_LEFTOVER.fullmatch(folder.name) for folder in root.glob(".*") if folder.is_dir())
    keys = sorted({match[1] for match in matches if match and pattern.fullmatch(match[1])})
    return [
        Preparation(root / key, sum(map(folder_bytes, leftovers(root / key))), is_locked(root, key))
        for key in keys
        if not (root / key).exists()
    ]


def leftovers(store: Path) -> list[Path]:
    """Return the hidden folders that belong to a store, which need not exist."""
    matches = ((folder, _LEFTOVER.fullmatch(folder.name)) for folder in store.parent.glob(".*") if folder.is_dir())
    return sorted(folder for folder, match in matches if match and match[1] == store.name)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, ignoring files that vanish."""
    size = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size += file.lstat().st_size if file.is_file() else 0
    return size


def find_stores(name: str) -> list[Path]:
    """Return a dataset's stores of all versions, and interrupted preparations.

    Raises UsageError if there are none.
    """
    resolved = resolve(name)
    begun = [preparation.store for preparation in preparations_of(resolved.name, resolved.source, any_version=True)]
    folders = [*stores_of(resolved.name, resolved.source, any_version=True), *begun]
    if not folders:
        raise UsageError(f"data: there is no store of {name!r} in {str(cache_root())!r}, so there is nothing to remove.")
    return folders


def remove_store(folder: Path) -> int:
    """Remove a store, renaming it first; return its bytes.

    Raises UsageError while it is being built, TrainerError.
    """
    try:
        with locked(folder.parent, folder.name, wait=False):
            size = sum(map(folder_bytes, leftovers(folder)))
            if folder.exists():
                size += folder_bytes(folder)
                put_aside(folder)
            for leftover in leftovers(folder):
                shutil.rmtree(leftover)
    except BlockingIOError as error:
        raise UsageError(f"data: {str(folder)!r} is being prepared now, and stays. End that first, or wait until it has ended.") from error
    except OSError as error:
        raise TrainerError(f"data: the store {str(folder)!r} cannot be removed: {error}.") from error
    return size
