"""Making a store: arrays from the source into a folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from ..core.errors import TrainerError, UsageError
from .base import DatasetSource, PreparedArrays
from .location import CACHE_VARIABLE, locked
from .manifest import FILES, SPLITS, FileEntry, Manifest, file_sha256, write_manifest

__all__ = ["build_store"]


def build_store(root: Path, key: str, name: str, source: DatasetSource, data_dir: Path | None, *, again: bool) -> None:
    """Make the store ``root/key``, unless it exists and `again` is false. Of several processes one makes it, the others wait.

    Raises UsageError where the source is broken or lacks its originals, TrainerError where the disk refuses.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, key):
            _remove_leftovers(root, key)
            if again or not (root / key).exists():
                _make(root, key, name, source, data_dir)
    except OSError as error:
        problem = f"data: the store of {name!r} cannot be made in {str(root)!r}: {error}"
        raise TrainerError(f"{problem}. Free some space or set {CACHE_VARIABLE} to a folder that you can write.") from error


def _make(root: Path, key: str, name: str, source: DatasetSource, data_dir: Path | None) -> None:
    """Write a draft beside the final place, then rename: only whole stores ever carry the final name."""
    arrays = source.load(data_dir)
    _check(name, arrays)
    draft = Path(tempfile.mkdtemp(prefix=f".{key}.draft-", dir=root))
    try:
        _write(draft, name, source.version, data_dir, arrays)
        _put_in_place(draft, root / key)
    except BaseException:
        shutil.rmtree(draft)
        raise


def _put_in_place(draft: Path, final: Path) -> None:
    """Give the draft its final name. An old store steps aside first; who has it open keeps reading it."""
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent))
        final.rename(old / "store")
        draft.rename(final)
        shutil.rmtree(old)
    else:
        draft.rename(final)
    _sync_folder(final.parent)


def _remove_leftovers(root: Path, key: str) -> None:
    """Remove what a killed process left. The caller holds the lock, so nobody is at work on these."""
    for kind in ("draft", "old"):
        for folder in root.glob(f".{key}.{kind}-*"):
            shutil.rmtree(folder)


def _write(folder: Path, name: str, version: int, data_dir: Path | None, arrays: PreparedArrays) -> None:
    folder.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
    entries: dict[str, FileEntry] = {}
    for (split, kind), file_name in FILES.items():
        array = np.ascontiguousarray(arrays.images[split] if kind == "images" else arrays.labels[split])
        path = folder / file_name
        with open(path, "wb") as handle:
            np.save(handle, array, allow_pickle=False)
            handle.flush()
            os.fsync(handle.fileno())
        path.chmod(0o444)
        entries[file_name] = FileEntry(sha256=file_sha256(path), bytes=path.stat().st_size, dtype=str(array.dtype), shape=array.shape)
    channels, height, width = arrays.images["train"].shape[1:]
    manifest = Manifest(
        name=name,
        version=version,
        data_dir=str(data_dir.resolve()) if data_dir else None,
        input_shape=(channels, height, width),
        classes=arrays.classes,
        sizes={split: len(arrays.labels[split]) for split in SPLITS},
        mean=arrays.mean,
        std=arrays.std,
        synthetic=arrays.synthetic,
        files=entries,
    )
    write_manifest(folder, manifest)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Ask the disk to keep the names in a folder (and the manifest, whose loss would be found by its digest)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(name: str, arrays: PreparedArrays) -> None:
    """Hold the source to what `PreparedArrays` promises. Raises UsageError."""
    problem = _problem(arrays)
    if problem:
        raise UsageError(f"data: the source of {name!r} is broken: {problem}.")


def _problem(arrays: PreparedArrays) -> str | None:
    if set(arrays.images) != set(SPLITS) or set(arrays.labels) != set(SPLITS):
        return f"it has the splits {sorted(arrays.images)} and {sorted(arrays.labels)}, not train and test"
    channels = arrays.images["train"].shape[1] if arrays.images["train"].ndim == 4 else 0
    for split in SPLITS:
        images, labels = arrays.images[split], arrays.labels[split]
        if images.dtype != np.uint8 or images.ndim != 4 or images.size == 0:
            return f"{split} images are {images.dtype} {list(images.shape)}, not uint8 [n, channels, height, width]"
        if labels.dtype != np.int64 or labels.shape != (len(images),):
            return f"{split} labels are {labels.dtype} {list(labels.shape)}, not int64 [{len(images)}]"
        if labels.min() < 0 or labels.max() >= arrays.classes:
            return f"{split} labels lie in {labels.min()}…{labels.max()}, not in 0…{arrays.classes - 1}"
        if images.shape[1:] != arrays.images["train"].shape[1:]:
            return f"test images have the shape {list(images.shape[1:])}, train images {list(arrays.images['train'].shape[1:])}"
    if len(arrays.mean) != channels or len(arrays.std) != channels:
        return f"mean and std have {len(arrays.mean)} and {len(arrays.std)} numbers for {channels} channels"
    if not np.isfinite([*arrays.mean, *arrays.std]).all() or min(arrays.std) <= 0:
        return f"mean {arrays.mean} and std {arrays.std} must be finite, std greater than 0"
    return None
