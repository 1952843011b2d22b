"""What a process that reads a user's model does, with any framework."""

from __future__ import annotations

import fcntl
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.drafts import replacing
from ...core.errors import TrainerError, UsageError, raised
from ...data.base import IMAGE
from ...data.columns import LENGTHS
from .description import DESCRIPTION, Description, file_digest, initial_file, local_digests, read_description, write_values
from .reference import HF, TORCHVISION, Reference, named_files, read_reference
from .requests import DataFacts, Request

EXAMPLES = 4  # rows of the batch that a model is tried with
MAX_TRIED_LENGTH = 6  # of its sequences
MAX_ELEMENTS = 1 << 26  # of an example of a column
Model = TypeVar("Model")


class Describer(Protocol[Model]):
    """A framework's part of reading a user's model."""

    def build(self, reference: Reference, request: Request) -> Model:
        """Import the model, and build it with the initial values of a seed. Raises UsageError."""

    def describe(self, reference: Reference, model: Model, request: Request, folder: Path) -> Description:
        """Try the model, and write its graphs, if it has any, into a folder. Raises UsageError."""

    def initial(self, model: Model) -> dict[str, NDArray[Any]]:
        """Return initial values by name, after `PARAMETER` or `BUFFER`."""


def answer(describer: Describer[Any], request: Request) -> str | None:
    """Write what is asked for; return what is wrong with the model, or None."""
    try:
        _write(describer, request)
    except TrainerError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 -- of the user's code, in any method of the model
        return f"model: {request.reference} cannot be used: {raised(error)}."
    return None


def _write(describer: Describer[Any], request: Request) -> None:
    reference, folder = read_reference(request.reference), Path(request.folder)
    before = local_digests(reference)
    with _locked(folder):
        if request.describe and read_description(folder) is not None:
            return  # another process was faster
        opened = _OpenedFiles(folder)
        sys.addaudithook(opened)
        model = describer.build(reference, request)
        if request.describe:
            for path in folder.glob("initial-*.npz"):  # of earlier sources
                path.unlink()
            description = describer.describe(reference, model, request, folder)
            description.sources |= _sources(reference) | opened.digests
            if local_digests(reference) != before:
                raise UsageError(f"model: a source of {reference.text} changed while it was read. Try again.")
            _write_initial(describer.initial(model), initial_file(folder, request.seed), reference)
            with replacing(folder / DESCRIPTION) as draft:
                draft.write_bytes(msgspec.json.encode(description))
        else:
            _write_initial(describer.initial(model), initial_file(folder, request.seed), reference)


class _OpenedFiles:
    """Audit hook for the digests of data files that the user's code opens, such as weights.

    Files of the system, and what libraries read of a user's settings and fonts, do not count.
    """

    MAX_FILES = 1_000
    _OTHERS = ("/proc/", "/sys/", "/dev/", "/usr/", "/etc/")
    _NAMES = re.compile(r"\.(pyc|pyo|py|ttf|ttc|otf|afm)$|/(keras|fontlist-[^/]*)\.json$")

    def __init__(self, folder: Path) -> None:
        self.digests: dict[str, str] = {}
        self._excluded = (*self._OTHERS, *{f"{prefix}/" for prefix in (sys.prefix, sys.base_prefix)}, f"{folder}/")
        self._reading = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or self._reading or len(self.digests) >= self.MAX_FILES:
            return
        path, mode, _ = arguments
        if not isinstance(path, str) or not isinstance(mode, str) or not mode.startswith("r") or self._NAMES.search(path):
            return
        whole = os.path.abspath(path)
        if (
            whole.startswith(self._excluded)
            or re.search(r"\.(dist|egg)-info/", whole)
            or whole in self.digests
            or not os.path.isfile(whole)
        ):
            return
        self._reading = True
        try:
            self.digests[whole] = file_digest(Path(whole))
        finally:
            self._reading = False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock within the block, and first remove what a killed process left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for draft in folder.glob(".*"):
            draft.unlink()
        yield
    finally:
        os.close(descriptor)


def _write_initial(values: Mapping[str, NDArray[Any]], path: Path, reference: Reference) -> None:
    for name, value in values.items():
        if not np.isfinite(value).all():
            raise UsageError(f"model: the initial values of {name.partition('/')[2]!r} of {reference.text} are not finite.")
    write_values(path, values)


def example_arrays(data: DataFacts) -> dict[str, NDArray[Any]]:
    """Return made-up values of every column for `EXAMPLES`, by name: float32 and int64."""
    generator = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for column in data.columns:
        fixed = column.fixed_shape
        if math.prod(fixed) > MAX_ELEMENTS:
            raise UsageError(f"model: an example of {column.name!r} has more than {MAX_ELEMENTS:,} numbers, too many for a model to try.")
        shape = [EXAMPLES, *([MAX_TRIED_LENGTH] if column.varies else []), *fixed]
        if column.dtype == "float32" or column.name == IMAGE:
            arrays[column.name] = generator.standard_normal(shape, np.float32)
        else:
            arrays[column.name] = generator.integers(0, column.limit or 2, shape)
        if column.varies:
            lengths = np.arange(MAX_TRIED_LENGTH, MAX_TRIED_LENGTH - EXAMPLES, -1)
            arrays[column.name + LENGTHS] = lengths
            arrays[column.name] *= (np.arange(MAX_TRIED_LENGTH) < lengths[:, None]).reshape(*shape[:2], *[1] * len(fixed))
    return arrays


def batch_in_words(data: DataFacts, columns: Sequence[str], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return what a batch of these columns is, for messages."""
    images = [column for column in data.columns if column.name == IMAGE]
    if images and list(columns) == [IMAGE]:
        return f"images of {'×'.join(map(str, images[0].shape))} (channels, height, width)"
    return f"the columns {', '.join(f'{name} {list(arrays[name].shape)}' for name in data.tensors(columns))}"


def output_problem(outputs: Any, wanted: int, tensor: type[Any]) -> str | None:
    """Return why these cannot be the outputs for `EXAMPLES` examples, or None."""
    needed = "logits [batch, classes] are needed." if wanted > 1 else "a number for each example, [batch] or [batch, 1], is needed."
    if isinstance(outputs, tuple | list):
        return f"returns a {type(outputs).__name__} of {len(outputs)}; return one tensor of them: {needed}"
    if not isinstance(outputs, tensor):
        return f"returns {type(outputs).__name__} for {EXAMPLES} examples; {needed}"
    if outputs.shape[:1] != (EXAMPLES,) or outputs.ndim not in ((2,) if wanted > 1 else (1, 2)):
        return f"returns a tensor of shape {tuple(outputs.shape)} for {EXAMPLES} examples; {needed}"
    count = outputs.shape[1] if outputs.ndim == 2 else 1
    if wanted > 1 and count != wanted:
        return f"returns {count} logits for data of {wanted} classes. Set its number of classes."
    return None if count == max(1, wanted) else f"returns {count} numbers for each example; {needed}"


def refuse_probabilities(reference: Reference, outputs: NDArray[Any]) -> None:
    """Raise UsageError for outputs [batch, classes] that are probabilities, not logits."""
    if outputs.ndim == 2 and outputs.shape[1] > 1 and (outputs >= 0).all() and np.allclose(outputs.sum(1), 1, atol=1e-4):
        raise UsageError(f"model: {reference.text} returns probabilities, and losses take logits. Leave its softmax out.")


def _sources(reference: Reference) -> dict[str, str]:
    """Return the digests of the user's files that were imported."""
    if reference.kind == TORCHVISION:
        return {}
    if reference.kind == HF:
        return {reference.place: file_digest(Path(reference.place))}
    installed = tuple(f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix})
    paths = set()
    for name, module in list(sys.modules.items()):
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        is_own = name.partition(".")[0] != __name__.partition(".")[0] and name != "__main__"
        if isinstance(path, str) and path.endswith(".py") and is_own and "site-packages" not in path and not path.startswith(installed):
            paths.add(path)
    named = {str(file) for path in paths for file in named_files(Path(path))}
    return {path: file_digest(Path(path)) for path in sorted(paths | named)}
