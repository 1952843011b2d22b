"""Descriptions of imported models: files that a process with the framework writes.

A description's folder is named by a digest of the reference, its arguments, the data's shape and the framework's version. It is used
as long as the files that the model was made from have the recorded digests.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...core.drafts import replacing
from ...core.errors import UsageError
from ...core.job import Job
from ...data.columns import LENGTHS
from ..base import Array, Method, ModelSpec
from .reference import Reference
from .requests import Request, ask

VERSION = 6  # of the files below
DESCRIPTION, TRAINING, EVALUATION, CONSTANTS = "description.json", "training.json", "evaluation.json", "constants.npz"
OWN_LOSS = "own_losses"  # function of the forward modules
MIN_ROWS = 2  # of blank examples for an empty batch: batch statistics of a single row can be undefined
MASKED_RANKS = (2, 3, 4)  # dimensions of tensors for which `models.dropout_masks` has masks
PARAMETER, BUFFER = "parameter/", "buffer/"  # prefixes of names in files of initial values; frozen parameters are among the buffers


class Description(msgspec.Struct):
    """What a process with the framework found out about a model.

    `inputs`: the columns that it reads. `has_loss`: it has a loss of its own, and `measured`, if its evaluation has logits too.
    `buffers`: also parameters without a gradient. `kernels`: weights that only convolutions read. `dropouts`: the batch's
    axis of each tensor that the model drops in, in order, −1 where an example has several rows. `sources`: SHA-256 of each file by path.
    `problems`: why a backend cannot train it, by the backend's name. `aliases`, `unsaved`: as in `ModelSpec`.
    """

    inputs: list[str]
    has_loss: bool
    measured: bool
    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    kernels: list[str]
    dropouts: list[int]
    multiply_adds: int
    sources: dict[str, str]
    problems: dict[str, str] = {}
    aliases: dict[str, str] = {}
    unsaved: list[str] = []


@dataclass(frozen=True, slots=True)
class Imported:
    """The settings of an imported model's spec, for forward functions.

    `inputs`: the names of the tensors that it reads, in order. `parameters`, `buffers`: names in the model's order. `measured`: as
    in `Description`.
    """

    reference: str
    folder: Path
    inputs: tuple[str, ...]
    measured: bool
    kernels: tuple[str, ...]
    dropouts: tuple[int, ...]
    request: Mapping[str, Any]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    @property
    def is_keras(self) -> bool:
        """Whether the model consists of Keras layers, which every framework carries out."""
        return bool(self.request["framework"] == "keras")

    @property
    def has_graph(self) -> bool:
        """Whether the model was exported as graphs, which every framework carries out."""
        return (self.folder / TRAINING).is_file()


@dataclass(frozen=True, slots=True)
class ImportedSpec(ModelSpec):
    """A model with its framework's own initial values, by seed.

    `framework`: that of the user's model. `problems`: as in `Description`.
    """

    problems: Mapping[str, str] = field(default_factory=dict)
    framework: str = "torch"

    def method(self, backend: str) -> Method:
        """Return how a backend carries the model out."""
        if self.framework == "keras":
            return "keras"
        return "native" if backend == self.framework else "translated"

    def refuse(self, job: Job) -> None:
        """Raise UsageError if the model is known not to train as the job asks."""
        if problem := self.problems.get(job.backend):
            sound = next(name for name in ("torch", "tf") if name not in self.problems)
            raise UsageError(f"{problem} It trains with --backend {sound}.")
        if job.precision != "fp32":
            raise UsageError(f"precision: got {job.precision!r}; {self.name} is an imported model, which trains in fp32 only.")
        if job.compile != "off":
            raise UsageError(f"compile: got {job.compile!r}; {self.name} is an imported model, which trains with --compile off only.")

    def refuse_program(self) -> None:
        """Raise UsageError, as a module has its own means to export programs."""
        raise UsageError(
            f"--format: {self.name} is an imported model. Only its weights can be exported: --format safetensors"
            f"{' or keras.' if self.framework == 'keras' else ', by the names of its state_dict.'}"
        )

    def initial(self, seed: int) -> dict[str, Array]:
        """Return the parameters' initial values by name."""
        values = self._initial(seed)
        return {parameter.name: values[PARAMETER + parameter.name] for parameter in self.parameters}

    def initial_buffers(self, seed: int = 0) -> dict[str, Array]:
        """Return the initial values by name of the buffers, and of parameters that are not trained."""
        values = self._initial(seed)
        return {buffer.name: values[BUFFER + buffer.name] for buffer in self.buffers}

    def _initial(self, seed: int) -> Mapping[str, Array]:
        imported: Imported = self.settings
        path = initial_file(imported.folder, seed)
        values = self._read_initial(path)
        if values is None:  # not written yet, or damaged
            path.unlink(missing_ok=True)
            ask(Request(**imported.request, seed=seed, folder=str(imported.folder), describe=False))
            values = self._read_initial(path)
        if values is None:
            raise UsageError(f"model: the arrays of {self.name} depend on the seed, or {str(path)!r} cannot be read.")
        return values

    def _read_initial(self, path: Path) -> Mapping[str, Array] | None:
        try:
            values = _read_values(path)
        except UsageError:
            return None
        shapes = {PARAMETER + part.name: part.shape for part in self.parameters} | {BUFFER + part.name: part.shape for part in self.buffers}
        return values if {name: value.shape for name, value in values.items() if value.dtype == np.float32} == shapes else None


def is_length(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor has the lengths of another column; blank examples have length 1."""
    return name.endswith(LENGTHS) and name.removesuffix(LENGTHS) in names


def initial_file(folder: Path, seed: int) -> Path:
    """Return the file of the initial values for a seed."""
    return folder / f"initial-{seed}.npz"


def read_description(folder: Path) -> Description | None:
    """Read a folder's description; None if there is none, or a source has changed since."""
    try:
        description = msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=Description)
    except (OSError, ValueError, RecursionError):  # also of msgspec
        return None
    return description if all(file_digest(Path(path)) == digest for path, digest in description.sources.items()) else None


def read_constants(folder: Path) -> dict[str, Array]:
    """Read the model's whole-number and boolean state, which training never changes."""
    return _read_values(folder / CONSTANTS)


def _read_values(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"model: {str(path)!r} is damaged ({error}). Remove its folder; it is written again.") from error


def source_digest(sources: Mapping[str, str]) -> str:
    """Return a digest of files' names and contents, independent of their folder; "" for none."""
    if not sources:
        return ""
    contents = sorted((Path(path).name, digest) for path, digest in sources.items())
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def local_digests(reference: Reference) -> dict[str, str]:
    """Return the digests of a reference's own files, by name."""
    return {name: file_digest(path) for name, path in reference.sources().items()}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a regular file; "" for anything else."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""
    except (OSError, ValueError):
        return ""


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write named arrays; the file is replaced as a whole."""
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, **values)
