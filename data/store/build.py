"""Building of a store: a folder that is published complete or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ...core.bounded_json import first_problem
from ...core.console import note, one_line, spelled
from ...core.errors import TrainerError, UsageError
from ..base import DatasetSource, LoadsInParts, PreparedArrays, PreparedBlocks, PreparedColumns, Split, TextFeatures
from ..features import described_features
from ..preprocessing import PixelCounts
from ..sources.translation.pairs import scoring_problem
from .location import CACHE_VARIABLE, locked, originals_fingerprint, put_aside
from .manifest import (
    SPLITS,
    ColumnEntry,
    ColumnManifest,
    FileEntry,
    Manifest,
    StoredFile,
    StoreManifest,
    attachment_problem,
    write_manifest,
)
from .writer import (
    SIDES,
    BrokenSourceError,
    ColumnWriter,
    FailedSourceError,
    SplitWriter,
    call_source,
    check_attachments,
    check_class_names,
    check_prepared,
    checked_texts,
    iterate_blocks,
    sync_folder,
    translation_problem,
)

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
Prepared = PreparedArrays | PreparedBlocks | PreparedColumns


def build_store(root: Path, key: str, name: str, source: DatasetSource, data_dir: Path | None, *, again: bool) -> None:
    """Build a missing store, or `again`.

    Raises UsageError for a broken source or missing originals, TrainerError for the disk.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, key):
            _remove_leftovers(root, key)
            if again or not (root / key).exists():
                _make(root, key, name, source, data_dir)
    except BrokenSourceError as error:
        raise UsageError(f"data: the source of {name!r} is broken: {error}.") from error
    except OSError as error:
        problem = f"data: the store of {name!r} cannot be made in {str(root)!r}: {error}"
        raise TrainerError(f"{problem}. Free some space or set {CACHE_VARIABLE} to a folder that you can write.") from error


def _make(root: Path, key: str, name: str, source: DatasetSource, data_dir: Path | None) -> None:
    work = root / f".{key}.work"
    resumes = getattr(source, "resumes", True)
    if not resumes and work.exists():  # of an attempt that was killed
        shutil.rmtree(work)
    begins = not work.exists()
    originals = None if data_dir is None else originals_fingerprint(source, data_dir)
    try:
        loaded = _load(source, work, data_dir)
    except BaseException as error:
        _settle(work, name, error, begins=begins, resumes=resumes)
        raise
    draft = Path(tempfile.mkdtemp(prefix=f".{key}.draft-", dir=root))
    try:
        draft.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        manifest = _write(draft, name, source.version, data_dir, loaded)
        write_manifest(draft, manifest)
        sync_folder(draft)  # the manifest's own digest would show a loss of its content
        if data_dir is not None and originals_fingerprint(source, data_dir) != originals:
            raise UsageError(f"data: the files of {name!r} in {str(data_dir)!r} have changed while they were read; prepare it again.")
        _put_in_place(draft, root / key)
        for line in manifest.notes:
            note(one_line(f"data: {name}: {line}"))
        if work.exists():
            shutil.rmtree(work)
    except BaseException as error:
        shutil.rmtree(draft)
        _settle(work, name, error, begins=begins, resumes=resumes)
        raise


def _load(source: DatasetSource, work: Path, data_dir: Path | None) -> Prepared:
    if isinstance(source, LoadsInParts):
        work.mkdir(exist_ok=True)
        loaded = call_source(source.load_in, work, data_dir)
        check_prepared(loaded, "load_in")
    else:
        loaded = call_source(source.load, data_dir)
        check_prepared(loaded, "load")
    return loaded


def _settle(work: Path, name: str, error: BaseException, *, begins: bool, resumes: bool) -> None:
    """Remove the parts of a refused preparation that began them.

    After other errors they are kept, if the source resumes.
    """
    if not work.exists():
        return
    if not resumes:
        shutil.rmtree(work)
        return
    if isinstance(error, UsageError | BrokenSourceError) and not isinstance(error, FailedSourceError):
        if begins:
            shutil.rmtree(work)
    elif isinstance(error, OSError):
        note(f"data: what has been done of {name} is kept in {str(work)!r}; trainer data remove {name} removes it")
    elif isinstance(error, KeyboardInterrupt | TrainerError | FailedSourceError):
        note(f"data: the finished parts of {name} are kept, and the next attempt resumes there")


def _put_in_place(draft: Path, final: Path) -> None:
    if final.exists():
        old = put_aside(final)
        draft.rename(final)
        shutil.rmtree(old)
    else:
        draft.rename(final)
    sync_folder(final.parent)


def _remove_leftovers(root: Path, key: str) -> None:
    """The caller must hold the lock."""
    for kind in ("draft", "old"):
        for folder in root.glob(f".{key}.{kind}-*"):
            shutil.rmtree(folder)


def _write(folder: Path, name: str, version: int, data_dir: Path | None, loaded: Prepared) -> StoreManifest:
    place = spelled(str(data_dir.resolve())) if data_dir else None
    common: dict[str, Any] = {"name": name, "version": version, "data_dir": place, "synthetic": loaded.synthetic}
    try:
        if isinstance(loaded, PreparedColumns):
            return ColumnManifest(**common, **_write_columns(folder, loaded))
        if isinstance(loaded, PreparedArrays):
            return Manifest(**common, **_write_images(folder, _as_blocks(loaded), (loaded.mean, loaded.std)))
        return Manifest(**common, **_write_images(folder, loaded, None))
    except ValidationError as error:
        raise BrokenSourceError(first_problem(error)) from error


def _write_images(folder: Path, prepared: PreparedBlocks, statistics: Statistics | None) -> dict[str, Any]:
    entries: dict[str, FileEntry] = {}
    sizes: dict[Split, int] = {}
    names = call_source(tuple, prepared.class_names)
    absent: tuple[str, ...] = ()
    pixels = PixelCounts(prepared.input_shape[0])
    for split in SPLITS:
        with SplitWriter(folder, split, prepared.input_shape, prepared.classes, pixels if split == "train" else None) as writer:
            for block in iterate_blocks(prepared.blocks[split], f"its blocks of {split}"):
                writer.add(block)
            entries |= writer.finish()
            sizes[split] = writer.count
        if not prepared.synthetic and (missing := set(range(prepared.classes)) - writer.labels):
            absent += (_absent_classes(split, sorted(missing), names),)
    left_out = checked_texts(prepared.left_out, "left_out")
    notes = checked_texts(prepared.notes, "notes") + absent
    counted = pixels.statistics()
    mean, std = _check_statistics(statistics or counted, counted[1])
    if constant := [str(channel) for channel, deviation in enumerate(counted[1]) if deviation == 0]:
        notes += (f"all train images have one value in channel {', '.join(constant)}, which is not scaled (std 1)",)
    notes += check_class_names(names)
    fields = {field: getattr(prepared, field) for field in ("input_shape", "classes", "flippable", "class_names")}
    return {**fields, "sizes": sizes, "mean": mean, "std": std, "left_out": left_out, "notes": notes, "files": entries}


def _absent_classes(split: Split, labels: Sequence[int], names: Sequence[str]) -> str:
    shown = [spelled(str(names[label])) if label < len(names) else str(label) for label in labels[:10]]
    more = f" and {len(labels) - 10:,} more" if len(labels) > 10 else ""
    return f"classes without a {split} example: {', '.join(shown)}{more}"


def _write_columns(folder: Path, prepared: PreparedColumns) -> dict[str, Any]:
    features = prepared.features
    translates = False
    if isinstance(features, TextFeatures) and features.languages:
        translates = True
        if (wrong := translation_problem(prepared, features)) is not None:
            raise BrokenSourceError(wrong)
    entries: dict[str, FileEntry] = {}
    sizes: dict[Split, int] = {}
    for split in SPLITS:
        with ColumnWriter(folder, split, prepared.columns, features, SIDES if translates else ()) as writer:
            for block in iterate_blocks(prepared.blocks[split], f"its blocks of {split}"):
                writer.add(block)
            entries |= writer.finish()
            sizes[split] = writer.count
    attachments = check_attachments(call_source(prepared.attachments))
    described = described_features(features)
    if translates:
        translated = {name: size for name, size in described["vocabulary_sizes"].items() if name in SIDES}
        if (wrong := scoring_problem(attachments, translated, sizes["test"])) is not None:
            raise BrokenSourceError(f"it says its languages {', '.join(described['languages'])}, and {wrong}")
    notes = check_class_names(features.class_names)
    return {
        "columns": tuple(ColumnEntry(name=column.name, dtype=column.dtype, shape=column.shape) for column in prepared.columns),
        **described,
        "sizes": sizes,
        "left_out": checked_texts(prepared.left_out, "left_out"),
        "notes": checked_texts(prepared.notes, "notes") + notes,
        "files": entries,
        "attachments": _write_attachments(folder, attachments),
    }


def _write_attachments(folder: Path, contents: Mapping[str, bytes]) -> dict[str, StoredFile]:
    entries: dict[str, StoredFile] = {}
    for name, content in contents.items():
        if problem := attachment_problem(name, len(content)):
            raise BrokenSourceError(f"its attachment {problem}")
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (folder / name).chmod(0o444)
        entries[name] = StoredFile(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    return entries


def _as_blocks(arrays: PreparedArrays) -> PreparedBlocks:
    """Return whole arrays as one block per split.

    Raises BrokenSourceError unless they are images.
    """
    images = arrays.images["train"]
    if images.ndim != 4:
        raise BrokenSourceError(f"train images are {images.dtype} {list(images.shape)}, not uint8 [n, channels, height, width]")
    blocks = {split: partial(iter, [(arrays.images[split], arrays.labels[split])]) for split in SPLITS}
    _, channels, height, width = images.shape
    return PreparedBlocks((channels, height, width), arrays.classes, blocks, arrays.synthetic, arrays.flippable, arrays.class_names)


def _check_statistics(statistics: Statistics, counted: Sequence[float]) -> Statistics:
    """Return mean and std, 1 for a constant channel, whose `counted` is 0.

    Raises BrokenSourceError.
    """
    mean, std = statistics
    channels = len(counted)
    if not all(isinstance(numbers, Sequence | np.ndarray) for numbers in statistics):
        raise BrokenSourceError(f"mean {mean!r} and std {std!r} are not a number for each channel")
    if len(mean) != channels or len(std) != channels:
        raise BrokenSourceError(f"mean and std have {len(mean)} and {len(std)} numbers for {channels} channels")
    if 0 in counted:
        std = tuple(
            1.0 if counted_deviation == deviation == 0 else deviation for counted_deviation, deviation in zip(counted, std, strict=True)
        )
    if not np.isfinite([*mean, *std]).all() or min(std) <= 0:
        raise BrokenSourceError(f"mean {mean} and std {std} must be finite, std greater than 0")
    if min(mean) < 0 or max(mean) > 1 or max(std) > 1:
        raise BrokenSourceError(f"mean {mean} and std {std} are those of pixels scaled to 0…1, so none may be above 1, or a mean below 0")
    return mean, std
