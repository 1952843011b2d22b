"""image-folder:PATH: pictures in folders of classes, decoded once to a common size.

They are in PATH/train/CLASS/… and PATH/test/CLASS/… (or PATH/val). Every file below a class folder is a picture, except hidden ones.
Undecodable files are named; they are skipped, and listed in the store's manifest, only with ``skip-damaged=yes``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.console import is_text, one_line, spelled
from ...core.errors import UsageError
from ..base import Block, PreparedBlocks, Split
from .arguments import read_arguments, whole_number, write_arguments
from .pictures import decode, limits_as_errors, result_or_why

_NAME = "image-folder"
_DEFAULTS = {"size": "224", "skip-damaged": "no", "background": "white", "links-outside": "no"}
_COLOURS = {"white": "ffffff", "black": "000000"}
_SPLITS: tuple[Split, ...] = ("train", "test")
_FOLDERS: Mapping[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val")}
_BLOCK_BYTES = 1 << 26  # decoded before they are written
_MAX_SHOWN = 100  # files or classes in an error
_MAX_LISTED = 10_000  # files in the store's manifest, which must stay readable
_LAYOUT = "PATH/train/CLASS/picture.jpg and PATH/test/CLASS/picture.jpg (or PATH/val/…)"


@dataclass(frozen=True)
class _ImageFolder:
    """Pictures of `folder` (None: --data-dir), scaled and cut to `size` × `size` pixels in RGB.

    `background`: the colour behind transparent parts, six hexadecimal digits. `links_outside`: symbolic links may lead out of the folder.
    """

    folder: Path | None = None
    size: int = 224
    skip_damaged: bool = False
    background: str = _COLOURS["white"]
    links_outside: bool = False

    description = "pictures in PATH/train/CLASS and PATH/test/CLASS: image-folder:PATH or image-folder:PATH?size=224,skip-damaged=no"
    version = 3

    @property
    def name(self) -> str:
        values = {
            "size": str(self.size),
            "skip-damaged": "yes" if self.skip_damaged else "no",
            "background": _colour_name(self.background),
            "links-outside": "yes" if self.links_outside else "no",
        }
        arguments = write_arguments(values, _DEFAULTS)
        text = f"{self.folder or ''}{'?' if arguments or '?' in str(self.folder) else ''}{arguments}"
        return f"{_NAME}:{text}" if text else _NAME

    def with_arguments(self, text: str) -> _ImageFolder:
        path, _, arguments = text.rpartition("?") if "?" in text and not os.path.isdir(os.path.expanduser(text)) else (text, "", "")
        values = read_arguments(_NAME, arguments, _DEFAULTS)
        for key in ("skip-damaged", "links-outside"):
            if values[key] not in ("yes", "no"):
                raise UsageError.of(f"data: {key} of {_NAME!r}", values[key], "yes, no", ["yes", "no"])
        background = values["background"].lower()
        colour = _COLOURS.get(background, background)
        if not re.fullmatch("[0-9a-f]{6}", colour):
            allowed = f"{', '.join(_COLOURS)}, or red, green and blue in six hexadecimal digits, such as 808080"
            raise UsageError.of(f"data: background of {_NAME!r}", values["background"], allowed, _COLOURS)
        folder = Path(os.path.expanduser(path)).absolute() if path else None
        size = whole_number(_NAME, "size", values["size"], 1, 4096)
        return _ImageFolder(folder, size, values["skip-damaged"] == "yes", colour, values["links-outside"] == "yes")

    def originals(self, data_dir: Path) -> Sequence[Path]:
        return [file for split in _SPLITS for file in _list(data_dir, split, self.links_outside).files]

    def load(self, data_dir: Path | None) -> PreparedBlocks:
        """Decode the pictures on demand, in one thread per core. Damaged ones are known at the end."""
        if data_dir is None:
            raise UsageError(f"data: {_NAME!r} needs a folder; write {_NAME}:PATH, where PATH holds {_LAYOUT}.")
        listings: dict[Split, _Listing] = {split: _list(data_dir, split, self.links_outside) for split in _SPLITS}
        classes = listings["train"].classes
        if unknown := sorted(set(listings["test"].classes) - set(classes)):
            raise UsageError(f"data: {str(listings['test'].root)!r} has classes that are missing in the train folder: {_join(unknown)}.")
        damaged = [f"{_describe_path(file)}: lies in no class folder" for listing in listings.values() for file in listing.strays]
        transparent: list[Path] = []
        block = max(1, _BLOCK_BYTES // (3 * self.size**2))
        attempt = partial(_decode_file, self.size, self.background, transparent)
        return PreparedBlocks(
            (3, self.size, self.size),
            len(classes),
            {split: partial(_decode_blocks, listing, classes, attempt, damaged, block) for split, listing in listings.items()},
            class_names=tuple(classes),
            left_out=partial(_left_out, damaged, self.skip_damaged),
            notes=partial(_notes, transparent, _colour_name(self.background)),
        )


def _colour_name(colour: str) -> str:
    return next((name for name, digits in _COLOURS.items() if digits == colour), colour)


def _notes(transparent: Sequence[Path], background: str) -> Sequence[str]:
    if not transparent:
        return ()
    count = "1 picture has" if len(transparent) == 1 else f"{len(transparent):,} pictures have"
    return (f"{count} transparent parts, which became {background} (background={background})",)


@dataclass(frozen=True)
class _Listing:
    """The sorted files of one split: pictures by class, and strays outside of class folders."""

    root: Path
    pictures: Mapping[str, Sequence[Path]]
    strays: Sequence[Path]

    @property
    def classes(self) -> list[str]:
        return list(self.pictures)

    @property
    def files(self) -> list[Path]:
        return [*(file for files in self.pictures.values() for file in files), *self.strays]


def _list(data_dir: Path, split: Split, links_outside: bool) -> _Listing:
    """Raises UsageError for a wrong layout, an unreadable folder, and forbidden links."""
    names = _FOLDERS[split]
    root = next((data_dir / name for name in names if (data_dir / name).is_dir()), None)
    if root is None:
        raise UsageError(f"data: {str(data_dir)!r} has no folder {' or '.join(map(repr, names))}; {_NAME} needs {_LAYOUT}.")
    outside: list[Path] = []
    leads_out = partial(_leads_out, root=os.path.realpath(data_dir), allowed=links_outside, outside=outside)
    try:
        entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
        folders = [] if leads_out(root) else [entry for entry in entries if entry.is_dir() and not leads_out(entry)]
        above = {_identity(data_dir), _identity(root)}
        pictures = {folder.name: sorted(_walk(folder, above, leads_out)) for folder in folders}
    except OSError as error:
        raise UsageError(f"data: '{spelled(str(error.filename))}' cannot be read: {error.strerror}.") from error
    if outside:
        count = "1 link leads" if len(outside) == 1 else f"{len(outside):,} links lead"
        advice = f"remove, or take with {_NAME}:PATH?links-outside=yes"
        raise UsageError(f"data: {count} out of {str(data_dir)!r}; {advice}:{_shown([_describe_path(path) for path in outside])}")
    if wrong := [spelled(name) for name in pictures if not is_text(name)]:
        raise UsageError(f"data: {str(root)!r} has class folders whose names are not UTF-8: {_join(wrong)}. Rename them.")
    if not pictures:
        raise UsageError(f"data: {str(root)!r} has no class folders; {_NAME} needs {_LAYOUT}.")
    if empty := [name for name, files in pictures.items() if not files]:
        raise UsageError(f"data: {str(root)!r} has class folders without a file: {_join(empty)}. Fill or remove them.")
    return _Listing(root, pictures, [entry for entry in entries if not entry.is_dir()])


def _leads_out(path: Path, *, root: str, allowed: bool, outside: list[Path]) -> bool:
    """Return whether a path is a forbidden link out of `root`, adding it to `outside`.

    Broken links are not.
    """
    if allowed or not path.is_symlink() or not path.exists() or Path(os.path.realpath(path)).is_relative_to(root):
        return False
    outside.append(path)
    return True


def _walk(top: Path, above: set[tuple[int, int]], leads_out: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the files at any depth, except hidden ones, following links.

    Reads each folder once, and none `above` `top`.
    """
    seen = set(above)
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        if (identity := _identity(folder)) in seen:
            continue
        seen.add(identity)
        with os.scandir(folder) as scanned:
            entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda entry: entry.name)
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink() and leads_out(path):
                continue
            if path.is_dir() if entry.is_symlink() else entry.is_dir():
                waiting.append(path)
            else:
                yield path


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _describe_path(path: Path) -> str:
    return one_line(spelled(str(path)))


def _shown(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in _cut_lines(lines, _MAX_SHOWN))


def _join(names: Sequence[str]) -> str:
    return ", ".join(map(one_line, _cut_lines(names, _MAX_SHOWN)))


def _cut_lines(lines: Sequence[str], most: int) -> Sequence[str]:
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most:,} more"]


Attempt = Callable[[Path], NDArray[np.uint8] | str]


def _decode_blocks(listing: _Listing, classes: Sequence[str], attempt: Attempt, damaged: list[str], block: int) -> Iterator[Block]:
    """Yield pictures in blocks; adds undecodable ones to `damaged`.

    Raises UsageError if all are.
    """
    rows = [(file, classes.index(name)) for name, files in listing.pictures.items() for file in files]
    usable = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # Pillow releases the interpreter's lock
        for start in range(0, len(rows), block):
            part = rows[start : start + block]
            with limits_as_errors():
                outcomes = list(threads.map(attempt, [file for file, _ in part]))
            images, labels = [], []
            for (file, label), outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, str):
                    damaged.append(f"{_describe_path(file)}: {outcome}")
                else:
                    images.append(outcome)
                    labels.append(label)
            if images:
                usable = True
                yield np.stack(images), np.array(labels, dtype=np.int64)
    if not usable:
        raise UsageError(f"data: no file of {str(listing.root)!r} is a usable picture:{_shown(damaged[-len(rows) :])}")


def _decode_file(size: int, background: str, transparent: list[Path], file: Path) -> NDArray[np.uint8] | str:
    if not file.is_file():
        return "a link that leads nowhere" if file.is_symlink() else "neither a file nor a folder"  # opening a pipe would block
    return result_or_why(partial(decode, file, size, background, transparent))


def _left_out(damaged: Sequence[str], allowed: bool) -> Sequence[str]:
    if damaged and not allowed:
        count = "1 file is no usable picture" if len(damaged) == 1 else f"{len(damaged):,} files are no usable pictures"
        raise UsageError(f"data: {count}; mend or remove, or leave out with {_NAME}:PATH?skip-damaged=yes:{_shown(damaged)}")
    return _cut_lines(damaged, _MAX_LISTED)


DATASET = _ImageFolder()
