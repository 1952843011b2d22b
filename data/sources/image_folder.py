"""image-folder:PATH: pictures in PATH/train/CLASS/… and PATH/test/CLASS/… (or PATH/val), decoded once to a common size.

Every file below a class folder counts as a picture, except hidden ones. What cannot be decoded is named, all of it at once; it is left
out only where ``skip-damaged=yes`` says so, and is then listed in the store's manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.untrusted.path_names import is_text, spelled
from ..base import Block, PreparedBlocks, Split
from .arguments import read_arguments, whole_number, write_arguments
from .pictures import decode

__all__ = ["DATASET", "ImageFolder"]

_NAME = "image-folder"
_DEFAULTS = {"size": "224", "skip-damaged": "no"}
_SPLITS: tuple[Split, ...] = ("train", "test")
_FOLDERS: Mapping[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}
_BLOCK = 256  # pictures decoded before they are written: 39 MB at 224×224
_LAYOUT = "PATH/train/CLASS/picture.jpg and PATH/test/CLASS/picture.jpg (or PATH/val/…)"


@dataclass(frozen=True)
class ImageFolder:
    """Pictures of `folder` (or of --data-dir where it is None), scaled and cut to `size` × `size` pixels in RGB."""

    folder: Path | None = None
    size: int = 224
    skip_damaged: bool = False

    description = "pictures in PATH/train/CLASS and PATH/test/CLASS: image-folder:PATH or image-folder:PATH?size=224,skip-damaged=no"
    version = 1

    @property
    def name(self) -> str:
        """The name with the folder's whole path and the arguments that are not the default ones."""
        values = {"size": str(self.size), "skip-damaged": "yes" if self.skip_damaged else "no"}
        arguments = write_arguments(values, _DEFAULTS)
        text = f"{self.folder or ''}{'?' if arguments else ''}{arguments}"
        return f"{_NAME}:{text}" if text else _NAME

    def with_arguments(self, text: str) -> ImageFolder:
        """Return the source for ``PATH``, ``PATH?size=64`` or ``?size=64`` (the folder then being --data-dir). Raises UsageError."""
        path, _, arguments = text.rpartition("?") if "?" in text else (text, "", "")
        values = read_arguments(_NAME, arguments, _DEFAULTS)
        if values["skip-damaged"] not in ("yes", "no"):
            raise UsageError.of(f"data: skip-damaged of {_NAME!r}", values["skip-damaged"], "yes, no", ["yes", "no"])
        folder = Path(os.path.expanduser(path)).absolute() if path else None
        return ImageFolder(folder, whole_number(_NAME, "size", values["size"], 1, 4096), values["skip-damaged"] == "yes")

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return every file of both splits. Raises UsageError where the folders are not laid out as they must be."""
        return [file for split in _SPLITS for file in _list(data_dir, split).files]

    def load(self, data_dir: Path | None) -> PreparedBlocks:
        """Decode the pictures as they are asked for, with as many threads as there are cores. Damaged ones are known at the end."""
        if data_dir is None:
            raise UsageError(f"data: {_NAME!r} needs a folder; write {_NAME}:PATH, where PATH holds {_LAYOUT}.")
        listings: dict[Split, _Listing] = {split: _list(data_dir, split) for split in _SPLITS}
        classes = listings["train"].classes
        if unknown := sorted(set(listings["test"].classes) - set(classes)):
            raise UsageError(f"data: {str(listings['test'].root)!r} has classes that the train folder lacks: {', '.join(unknown)}.")
        damaged = [f"{file}: lies in no class folder" for listing in listings.values() for file in listing.strays]
        blocks = {split: partial(_decoded, listing, classes, self.size, damaged) for split, listing in listings.items()}
        left_out = partial(_left_out, damaged, self.skip_damaged)
        return PreparedBlocks((3, self.size, self.size), len(classes), blocks, class_names=tuple(classes), left_out=left_out)


@dataclass(frozen=True)
class _Listing:
    """The files of one split: pictures by class, and strays outside of every class folder. Everything is sorted."""

    root: Path
    pictures: Mapping[str, Sequence[Path]]
    strays: Sequence[Path]

    @property
    def classes(self) -> list[str]:
        return list(self.pictures)

    @property
    def files(self) -> list[Path]:
        return [*(file for files in self.pictures.values() for file in files), *self.strays]


def _list(data_dir: Path, split: Split) -> _Listing:
    """List a split's folder. Raises UsageError where it is missing, has no class folders, or one of them has no file."""
    names = _FOLDERS[split]
    root = next((data_dir / name for name in names if (data_dir / name).is_dir()), None)
    if root is None:
        raise UsageError(f"data: {str(data_dir)!r} has no folder {' or '.join(map(repr, names))}; {_NAME} needs {_LAYOUT}.")
    entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    pictures = {entry.name: sorted(_below(entry)) for entry in entries if entry.is_dir()}
    if wrong := [spelled(name) for name in pictures if not is_text(name)]:
        raise UsageError(f"data: {str(root)!r} has class folders whose names are not UTF-8: {', '.join(wrong)}. Rename them.")
    if not pictures:
        raise UsageError(f"data: {str(root)!r} has no class folders; {_NAME} needs {_LAYOUT}.")
    if empty := [name for name, files in pictures.items() if not files]:
        raise UsageError(f"data: {str(root)!r} has class folders without a file: {', '.join(empty)}. Fill or remove them.")
    return _Listing(root, pictures, [entry for entry in entries if not entry.is_dir()])


def _below(folder: Path) -> Iterator[Path]:
    """Find the files at any depth, also behind links to folders; hidden ones (system files such as .DS_Store) are no pictures."""
    for path, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(path, name) for name in names if not name.startswith("."))


def _decoded(listing: _Listing, classes: Sequence[str], size: int, damaged: list[str]) -> Iterator[Block]:
    """Yield the pictures of a split block by block; what cannot be decoded is added to `damaged`."""
    rows = [(file, classes.index(name)) for name, files in listing.pictures.items() for file in files]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # Pillow decodes outside the interpreter's lock
        for start in range(0, len(rows), _BLOCK):
            part = rows[start : start + _BLOCK]
            images, labels = [], []
            for (file, label), outcome in zip(part, threads.map(partial(_attempt, size), [file for file, _ in part]), strict=True):
                if isinstance(outcome, str):
                    damaged.append(f"{file}: {outcome}")
                else:
                    images.append(outcome)
                    labels.append(label)
            if images:
                yield np.stack(images), np.array(labels, dtype=np.int64)


def _attempt(size: int, file: Path) -> NDArray[np.uint8] | str:
    """Return the decoded picture, or what is wrong with it in one line."""
    if not file.is_file():
        return "a link that leads nowhere" if file.is_symlink() else "neither a file nor a folder"  # a pipe would be waited for
    try:
        return decode(file, size)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 — Pillow's many readers raise many things; every one of them is reported
        return " ".join(f"{type(error).__name__}: {error}".split())


def _left_out(damaged: Sequence[str], allowed: bool) -> Sequence[str]:
    if damaged and not allowed:
        shown = "".join(f"\n  {line}" for line in damaged)
        count = "1 file is no usable picture" if len(damaged) == 1 else f"{len(damaged)} files are no usable pictures"
        raise UsageError(f"data: {count}; mend or remove, or leave out with {_NAME}:PATH?skip-damaged=yes:{shown}")
    return damaged


DATASET = ImageFolder()
