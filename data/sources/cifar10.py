"""cifar10: photographs of ten kinds of things, 32×32×3, from the python or binary archive.

50,000 train and 10,000 test examples (A. Krizhevsky, 2009). python: pickled dictionaries with ``data`` uint8 [n, 3072] and ``labels``;
binary: records of a label byte and 3,072 pixel bytes. Pixels are three planes (red, green, blue) of 32 rows.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ..base import Block, PreparedBlocks, Split
from .download import expect_md5, files_of

PYTHON, BINARY, FOLDER = "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "cifar-10-batches-py"
MD5: Mapping[str, str] = {  # as listed by the dataset's page and torchvision
    PYTHON: "c58f30108f718f92721af3b95e74349a",
    BINARY: "c32a1d4ab5d03f1284b67883e8d87530",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCHES: Mapping[Split, tuple[str, ...]] = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
_PIXELS = 3 * 32 * 32
_DOWNLOAD_SECONDS = 2 * 3600  # 170 MB on a slow connection
_HINT = f"give --data-dir with the folder of {PYTHON}, {BINARY} or {FOLDER}"


@dataclass(frozen=True)
class Cifar10Source:
    """Reads an archive (or the unpacked python version), or downloads it.

    `md5`: checksums by file.
    """

    md5: Mapping[str, str] = field(default_factory=lambda: MD5)

    name = "cifar10"
    description = "photographs of ten kinds of things, 32×32×3; downloaded through torchvision, or its archive from --data-dir"
    version = 1

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the archive, or the six unpacked files. Raises UsageError if there are none."""
        for archive in (PYTHON, BINARY):
            if (data_dir / archive).is_file():
                return [data_dir / archive]
        names = [name for batches in _BATCHES.values() for name in batches]
        for folder in (data_dir / FOLDER, data_dir):
            if all((folder / name).is_file() for name in names):
                return [folder / name for name in names]
        raise UsageError(f"data_dir: {str(data_dir)!r} has no files of cifar10; {_HINT}.")

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedBlocks:
        """Verify the checksums of the files of `data_dir`, or of downloaded ones, and read them."""
        files = self.originals(files_of("cifar10", data_dir, work, _DOWNLOAD_SECONDS, _HINT))
        for file in files:
            expect_md5(file, self.md5[file.name])
        if len(files) == 1:
            contents = _unpack(files[0])
            parse = _read_records if files[0].name == BINARY else _read_pickle
        else:
            contents = {file.name: file.read_bytes() for file in files}
            parse = _read_pickle
        origin = files[0] if len(files) == 1 else files[0].parent
        examples = {split: [_read_batch(parse, origin, name, contents[name]) for name in names] for split, names in _BATCHES.items()}
        return PreparedBlocks((3, 32, 32), 10, {split: blocks.__iter__ for split, blocks in examples.items()}, class_names=CLASSES)


def _unpack(archive: Path) -> dict[str, bytes]:
    """In memory only, so that nothing unpacked reaches the disk."""
    wanted = {name for names in _BATCHES.values() for name in names}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name).name.removesuffix(".bin")
                content = tar.extractfile(member) if name in wanted else None
                if content is not None:
                    contents[name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise _unusable(archive, f"it is no whole archive ({error})") from error
    if missing := sorted(wanted - set(contents)):
        raise _unusable(archive, f"missing: {', '.join(missing)}")
    return contents


class _ArraysOnly(pickle.Unpickler):
    """Reads only plain values and numpy arrays: unpickling must not run code of a file."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        allowed = {("numpy", "ndarray"), ("numpy", "dtype")} | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
        if (module_name, global_name) not in allowed:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong there")
        return super().find_class(module_name, global_name)


def _read_pickle(content: bytes) -> Block:
    batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], dtype=np.int64)


def _read_records(content: bytes) -> Block:
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _read_batch(parse: Callable[[bytes], Block], origin: Path, name: str, content: bytes) -> Block:
    try:
        images, labels = parse(content)
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError, AttributeError, IndexError) as error:
        raise _unusable(origin, f"{name} cannot be read ({type(error).__name__}: {error})") from error
    sound = images.dtype == np.uint8 and images.ndim == 2 and images.shape[1] == _PIXELS and labels.shape == (len(images),)
    if not sound or (len(labels) and not 0 <= labels.min() <= labels.max() <= 9):
        raise _unusable(origin, f"{name} holds {images.dtype} {list(images.shape)} and labels {list(labels.shape)}, or labels beyond 0…9")
    return images.reshape(-1, 3, 32, 32), labels


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"data_dir: {str(path)!r} is not usable as cifar10: {why}. Get the original file again.")


DATASET = Cifar10Source()
