"""Which datasets are there, which stores of them, and which preparations that have none yet? The rows of ``trainer data list``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core import plugins
from ...core.errors import TrainerError
from ..base import DatasetSource
from .integrity import check_sizes
from .interrupted import Preparation, preparations_of
from .location import stores_of
from .manifest import MANIFEST, ColumnManifest, Manifest, read_manifest
from .resolve import resolve

__all__ = ["DatasetStatus", "list_datasets"]


@dataclass(frozen=True, slots=True)
class DatasetStatus:
    """A row of ``trainer data list``: a dataset, and one store of it where there is one (`data_dir` where made from the user's files).

    `left_out` names the originals that are not in the store; `languages` and `pieces`, the size of the
    vocabulary, are those of text. `problem` says why the source cannot be used, or what is wrong with the
    store at first sight. `begun`, of a preparation that has no store yet: ``interrupted``, or ``at work`` where
    a process is at it; `bytes` is then what it has so far, and `path` where the store will be.
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
    """Return a row for every store of every known dataset and every preparation that has none yet, and one for a dataset with neither.

    A broken source has a row too.
    """
    rows: list[DatasetStatus] = []
    for name in plugins.available("dataset"):
        try:
            source = resolve(name).source
        except TrainerError as error:
            rows.append(DatasetStatus(name, "", prepared=False, problem=str(error)))
            continue
        stores = [_status(name, source, folder) for folder in stores_of(name, source)]
        stores += [_begun(name, source, preparation) for preparation in preparations_of(name, source)]
        rows += stores or [DatasetStatus(name, source.description, prepared=False, version=source.version)]
    return rows


def _begun(name: str, source: DatasetSource, preparation: Preparation) -> DatasetStatus:
    begun: Literal["interrupted", "at work"] = "at work" if preparation.at_work else "interrupted"
    path = str(preparation.store)
    return DatasetStatus(name, source.description, prepared=False, version=source.version, bytes=preparation.bytes, path=path, begun=begun)


def _status(name: str, source: DatasetSource, folder: Path) -> DatasetStatus:
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
        classes=manifest.classes if isinstance(manifest, Manifest) else None,
        input_shape=manifest.input_shape if isinstance(manifest, Manifest) else None,
        languages=manifest.languages if isinstance(manifest, ColumnManifest) else None,
        pieces=max(manifest.vocabulary_sizes.values(), default=None) if isinstance(manifest, ColumnManifest) else None,
        synthetic=manifest.synthetic,
        bytes=manifest.total_bytes,
        path=str(folder),
        data_dir=manifest.data_dir,
        left_out=manifest.left_out,
        problem="; ".join(problems) or None,
    )
