"""Reading and verification of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.bounded_json import UnreadableError
from ..core.errors import UsageError
from ..data.store.stored_dataset import StoredDataset
from ..models.base import ModelSpec
from ..models.build import build_model
from .files import MANIFEST, digest_of, map_arrays, read_manifest
from .meta import META, Meta, data_info, described_model, read_meta

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"
_FILES = {"parameters": PARAMETERS, "buffers": PARAMETERS, "slots": OPTIMIZER}


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array `key` (``parameters/NAME``, ``buffers/NAME`` or ``slots/SLOT/NAME``).

    `dtype` is numpy's type string (``<f4``).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the array's values."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def file(self) -> str:
        """Name of the file that holds the array. Raises ValueError for an invalid key."""
        kind, _, name = self.key.partition("/")
        if kind not in _FILES or not name:
            raise ValueError(f"{self.key!r} is no key of a checkpoint's array")
        return _FILES[kind]

    @property
    def name(self) -> str:
        """The canonical name, or ``SLOT/NAME``."""
        return self.key.partition("/")[2]


def rebuilt_model(meta: Meta) -> ModelSpec:
    """Rebuild a checkpoint's model. Raises UsageError if the model of this name has changed."""
    name = meta.job["model"]
    spec: ModelSpec = build_model(name, data_info(meta.data), meta.job.get("loss"))
    now = described_model(spec)
    for kind in ("parameters", "buffers"):
        before, after = _shapes(meta.model[kind]), _shapes(now[kind])
        if before != after:
            differing = sorted(array for array in before.keys() | after.keys() if before.get(array) != after.get(array))
            raise UsageError(
                f"model: {name!r} is not what the checkpoint was made of; its {kind} differ in {', '.join(differing[:5])}"
                f"{' and others' if len(differing) > 5 else ''}. Use the release that trained it."
            )
    if spec.source != meta.model.get("source", ""):
        raise UsageError(f"model: {_CHANGED_SOURCE.format(name=name)}. Restore the files that it was trained from.")
    return spec


_CHANGED_SOURCE = "the source of {name} has changed since the checkpoint was saved"


def model_problem(spec: ModelSpec, meta: Meta) -> list[str]:
    """Return the first difference between a model's arrays and a checkpoint's.

    Empty if there is none.
    """
    now = described_model(spec)
    for kind in ("parameters", "buffers"):
        known, built = _shapes(meta.model[kind]), _shapes(now[kind])
        for name in [*built, *known]:
            if built.get(name) != known.get(name):
                singular = kind.removesuffix("s")
                return [
                    f"{singular} {name} has shape {built.get(name, 'none')} in the model and {known.get(name, 'none')} in the checkpoint"
                ]
    return [] if spec.source == meta.model.get("source", "") else [_CHANGED_SOURCE.format(name=spec.name)]


def data_problem(data: StoredDataset, meta: Meta) -> list[str]:
    """Return the difference between a dataset and a checkpoint's; empty if there is none."""
    if data.digest == meta.data["digest"]:
        return []
    names = f"{data.info.name!r} and {meta.data['name']!r}" if data.info.name != meta.data["name"] else f"{data.info.name!r}"
    return [f"the data is not the same ({names}: digest {data.digest[:12]} instead of {meta.data['digest'][:12]})"]


class DamagedCheckpointError(UsageError):
    """A checkpoint differs from its manifest or its description."""

    def __init__(self, path: Path, file: str, problem: str) -> None:
        super().__init__(f"checkpoint {str(path)!r} is damaged: {file} {problem}.")
        self.path = path
        self.file = file
        self.problem = problem


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `arrays` by key (see `ArrayEntry`) are read-only maps of its files."""

    path: Path
    meta: Meta
    arrays: Mapping[str, NDArray[Any]]

    @property
    def parameters(self) -> dict[str, NDArray[Any]]:
        """Parameters by canonical name."""
        return self._arrays_below("parameters/")

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        """Buffers by canonical name."""
        return self._arrays_below("buffers/")

    def slot(self, name: str) -> dict[str, NDArray[Any]]:
        """Return an optimizer's slot by canonical parameter name; empty if it is missing."""
        return self._arrays_below(f"slots/{name}/")

    def _arrays_below(self, prefix: str) -> dict[str, NDArray[Any]]:
        return {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint's listed files.

    Raises DamagedCheckpointError for the first invalid one.
    """
    try:
        files = read_manifest(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(path, MANIFEST, str(error)) from error
    for name, expected in files.items():
        try:
            size = (path / name).stat().st_size
            if size != expected.bytes:
                raise DamagedCheckpointError(path, name, f"has {size} bytes instead of {expected.bytes}")
            if digest_of(path / name, expected.algorithm) != expected:
                raise DamagedCheckpointError(path, name, "differs from its digest")
        except FileNotFoundError as error:
            raise DamagedCheckpointError(path, name, "is missing") from error
        except OSError as error:
            raise DamagedCheckpointError(path, name, f"cannot be read ({error.strerror})") from error
        except UnreadableError as error:
            raise DamagedCheckpointError(path, name, str(error)) from error
    return _verify(path, listed=frozenset(files))


def _verify(path: Path, listed: frozenset[str]) -> Checkpoint:
    for name in (META, PARAMETERS):
        if name not in listed:
            raise DamagedCheckpointError(path, MANIFEST, f"does not list {name}")
    try:
        meta = read_meta(path)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(path, META, str(error)) from error
    parameters, buffers = (_shapes(meta.model[kind]) for kind in ("parameters", "buffers"))
    stored = _map(path, PARAMETERS)
    _check(path, PARAMETERS, stored, chain(parameters.items(), buffers.items()))
    arrays = {f"{'buffers' if name in buffers else 'parameters'}/{name}": array for name, array in stored.items()}
    if OPTIMIZER in listed:
        slots = _map(path, OPTIMIZER)
        kinds = dict.fromkeys(name.partition("/")[0] for name in slots)
        _check(path, OPTIMIZER, slots, ((f"{slot}/{name}", shape) for slot in kinds for name, shape in parameters.items()))
        arrays.update({f"slots/{name}": array for name, array in slots.items()})
    return Checkpoint(path, meta, arrays)


def _shapes(described: list[tuple[str, list[int]]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in described}


def _check(path: Path, file: str, arrays: Mapping[str, NDArray[Any]], described: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    known = set()
    for name, shape in described:
        if name not in arrays:
            raise DamagedCheckpointError(path, file, f"is missing {_shorten(name)}, which {META} has with the shape {_shorten(shape)}")
        if arrays[name].shape != shape or arrays[name].dtype != np.float32:
            description = f"{arrays[name].dtype} of the shape {arrays[name].shape}"
            raise DamagedCheckpointError(
                path, file, f"has {_shorten(name)} as {description}, and {META} as float32 of the shape {_shorten(shape)}"
            )
        known.add(name)
    for name in arrays:
        if name not in known:
            raise DamagedCheckpointError(path, file, f"has {_shorten(name)}, of which {META} says nothing")


def _shorten(what: object) -> str:
    return repr(what)[:100]


def _map(path: Path, file: str) -> dict[str, NDArray[Any]]:
    try:
        return map_arrays(path / file)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(path, file, str(error)) from error
