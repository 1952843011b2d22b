"""npz:PATH: arrays of examples as labelled images, or as columns with a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....core.errors import UsageError
from ...base import PreparedBlocks, PreparedColumns
from ..arguments import absolute_path, existing_file, read_arguments, read_share, write_arguments
from ..disk import require_disk
from .examples import Examples
from .npz import NpzFile

DEFAULTS = {"target": "y", "task": "auto", "layout": "auto", "standardise": "yes", "share": "0.2"}
_CHOICES = {
    "task": ("auto", "classes", "regression"),
    "layout": ("auto", "channels-first", "channels-last"),
    "standardise": ("yes", "no"),
}


def read_choices(name: str, arguments: str) -> dict[str, str]:
    """Return how arrays are read, from a dataset's arguments. Raises UsageError."""
    values = read_arguments(name, arguments, DEFAULTS)
    for key, allowed in _CHOICES.items():
        if values[key] not in allowed:
            raise UsageError.of(f"data: {key} of {name!r}", values[key], ", ".join(allowed), allowed)
    read_share(name, values["share"])
    return values


@dataclass(frozen=True)
class NpzSource:
    """Arrays of a file: inputs and a target, with or without arrays of their own for the test.

    Arrays called NAME_test, and NAME or NAME_train, belong together; without the former a hash of each example decides.
    """

    path: Path | None = None
    values: dict[str, str] = field(default_factory=dict)

    version = 1
    resumes = False
    description = "arrays of numpy: npz:PATH?target=y, with x and y, and x_test and y_test for the test"

    @property
    def name(self) -> str:
        """npz:PATH with the arguments that are no defaults."""
        if self.path is None:
            return "npz"
        arguments = write_arguments(self.values, DEFAULTS)
        return f"npz:{self.path}{'?' if arguments else ''}{arguments}"

    @property
    def folder(self) -> Path | None:
        """The folder that holds the file."""
        return self.path.parent if self.path else None

    def with_arguments(self, text: str) -> NpzSource:
        """Return the source of PATH?ARGUMENTS. Raises UsageError."""
        path, _, arguments = text.partition("?")
        values = read_choices("npz", arguments)
        if not path:
            raise UsageError("data: 'npz' needs a file; write npz:PATH.")
        return replace(self, path=absolute_path(path), values=values)

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the file. Raises UsageError if it is missing."""
        return [existing_file(self.path, "npz", "npz:PATH")]

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedBlocks | PreparedColumns:
        """Read the file block by block."""
        (path,) = self.originals(data_dir or Path())
        try:
            file = NpzFile(path)
            require_disk(path, work, sum(header.size_bytes for header in file.arrays.values()))
            return Examples(file, self.values).prepared()
        except OSError as error:
            raise UsageError(f"data: {str(path)!r} cannot be read: {error.strerror}.") from error


NPZ = NpzSource()
