"""torch-dataset:FILE.py:train,test: Datasets of a file, read in a process of its own.

``python -m crosstrain.data.sources.arrays.python_datasets FILE NAMES FOLDER`` writes their examples into a folder, as x.npy and y.npy, and
x_test.npy and y_test.npy. The last line of its output says what is wrong, or what to note.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....core.console import note
from ....core.errors import TrainerError, UsageError
from ....core.process import child_working_directory, command_ending_with_parent, public_environment, python
from ...base import PreparedBlocks, PreparedColumns
from ..arguments import absolute_path, existing_file, write_arguments
from .examples import Examples
from .folder import NpyFolder
from .pairs import DRAWN_ONCE, write_pairs
from .source import DEFAULTS, read_choices

RANDOM = "random"
_ARRAYS = (("x", "y"), ("x_test", "y_test"))
_FORM = "torch-dataset:FILE.py:TRAIN,TEST"


@dataclass(frozen=True)
class DatasetSource:
    """Map-style Datasets of pairs (x, y), by their names in a file.

    A name is an object, or a function or class that makes one without arguments.
    """

    path: Path | None = None
    names: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)

    version = 1
    resumes = False
    description = f"your Datasets of (x, y): {_FORM}"

    @property
    def name(self) -> str:
        """torch-dataset:FILE.py:NAMES with the arguments that are no defaults."""
        if self.path is None:
            return "torch-dataset"
        arguments = write_arguments(self.values, DEFAULTS)
        return f"torch-dataset:{self.path}:{','.join(self.names)}{'?' if arguments else ''}{arguments}"

    @property
    def folder(self) -> Path | None:
        """The folder that holds the file."""
        return self.path.parent if self.path else None

    def with_arguments(self, text: str) -> DatasetSource:
        """Return the source of FILE.py:NAMES?ARGUMENTS. Raises UsageError."""
        place, _, arguments = text.partition("?")
        path, colon, listed = place.rpartition(":")
        names = tuple(name.strip() for name in listed.split(","))
        if not colon or not path.endswith(".py") or not 1 <= len(names) <= 2 or not all(name.isidentifier() for name in names):
            raise UsageError.of("data: 'torch-dataset'", text, _FORM)
        values = read_choices("torch-dataset", arguments)
        return replace(self, path=absolute_path(path), names=names, values=values)

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the file. Raises UsageError if it is missing."""
        return [existing_file(self.path, "torch-dataset", _FORM)]

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedBlocks | PreparedColumns:
        """Execute the file in a process, and read what it writes into `work`."""
        (path,) = self.originals(data_dir or Path())
        folder = work / "arrays"
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        folder.mkdir()
        note(f"data: reading the Datasets of {path.name}, once")
        done = subprocess.run(
            command_ending_with_parent(python(__name__, str(path), ",".join(self.names), str(folder))),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=child_working_directory(),
            env=public_environment(),
            check=False,
        )
        last = next((line for line in reversed((done.stderr if done.returncode else done.stdout).splitlines()) if line.strip()), "")
        if done.returncode:
            raise UsageError(f"data: the Datasets of {path.name!r} cannot be read: {last.strip().removeprefix('data: ')}")
        if last == RANDOM:
            note(DRAWN_ONCE)
        return Examples(NpyFolder(folder, path), self.values).prepared()


def write_datasets(path: Path, names: Sequence[str], folder: Path) -> bool:
    """Write the examples of a file's Datasets; return whether an example differs each time.

    Raises ValueError for what is no Dataset of pairs.
    """
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    is_random = False
    for name, arrays in zip(names, _ARRAYS, strict=False):
        dataset = getattr(module, name, None)
        dataset = dataset() if callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__getitem__")) else dataset
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ValueError(f"{name!r} is no Dataset with __len__ and __getitem__")
        is_random = write_pairs(repr(name), dataset, [folder / f"{array}.npy" for array in arrays]) or is_random
    return is_random


def main(path: str, names: str, folder: str) -> None:
    """Write the Datasets of a file; an exception's last line is the message."""
    try:
        is_random = write_datasets(Path(path), names.split(","), Path(folder))
    except TrainerError as error:
        sys.exit(str(error))
    sys.stdout.write(f"\n{RANDOM if is_random else ''}\n")


DATASET = DatasetSource()

if __name__ == "__main__":
    main(*sys.argv[1:])
