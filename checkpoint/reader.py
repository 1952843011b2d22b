"""Reading a checkpoint, with every digest compared first, and then its arrays with its own description of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..core.untrusted.bounded_json import UnreadableError
from .array_index import OPTIMIZER, PARAMETERS
from .manifest import MANIFEST, digest_of, read_manifest
from .meta import META, Meta, read_meta
from .safetensors_file import map_arrays

__all__ = ["Checkpoint", "DamagedCheckpointError", "read_checkpoint"]


class DamagedCheckpointError(UsageError):
    """A checkpoint is not what was written; the message names the file and what is wrong with it."""

    def __init__(self, path: Path, file: str, problem: str) -> None:
        super().__init__(f"checkpoint {str(path)!r} is damaged: {file} {problem}.")
        self.path = path
        self.file = file
        self.problem = problem


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found sound. `arrays` by key (see `ArrayEntry`) are read-only maps of its files."""

    path: Path
    meta: Meta
    arrays: Mapping[str, NDArray[Any]]

    @property
    def parameters(self) -> dict[str, NDArray[Any]]:
        """The parameters by canonical name."""
        return self._of("parameters/")

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        """The buffers by canonical name."""
        return self._of("buffers/")

    def slot(self, name: str) -> dict[str, NDArray[Any]]:
        """What the update rule keeps under a slot's name beside each parameter, by the parameter's canonical name; empty without it."""
        return self._of(f"slots/{name}/")

    def _of(self, prefix: str) -> dict[str, NDArray[Any]]:
        return {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint's folder; files that its manifest does not list are none of its business.

    Raises DamagedCheckpointError for the first file that is missing or not as it was written, or that this release cannot read.
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
    return _verified(path, listed=frozenset(files))


def _verified(path: Path, listed: frozenset[str]) -> Checkpoint:
    for name in (META, PARAMETERS):
        if name not in listed:
            raise DamagedCheckpointError(path, MANIFEST, f"does not list {name}")
    try:
        meta = read_meta(path)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(path, META, str(error)) from error
    parameters, buffers = (_shapes(meta.model[kind]) for kind in ("parameters", "buffers"))
    found = _map(path, PARAMETERS)
    _check(path, PARAMETERS, found, chain(parameters.items(), buffers.items()))
    arrays = {f"{'buffers' if name in buffers else 'parameters'}/{name}": array for name, array in found.items()}
    if OPTIMIZER in listed:
        slots = _map(path, OPTIMIZER)
        kinds = dict.fromkeys(name.partition("/")[0] for name in slots)
        _check(path, OPTIMIZER, slots, ((f"{slot}/{name}", shape) for slot in kinds for name, shape in parameters.items()))
        arrays.update({f"slots/{name}": array for name, array in slots.items()})
    return Checkpoint(path, meta, arrays)


def _shapes(described: list[tuple[str, list[int]]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in described}


def _check(path: Path, file: str, found: Mapping[str, NDArray[Any]], described: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise DamagedCheckpointError for the first array that is missing, of another shape or no float32, or not described."""
    known = set()
    for name, shape in described:
        if name not in found:
            raise DamagedCheckpointError(path, file, f"is missing {_shown(name)}, which {META} has with the shape {_shown(shape)}")
        if found[name].shape != shape or found[name].dtype != np.float32:
            there = f"{found[name].dtype} of the shape {found[name].shape}"
            raise DamagedCheckpointError(path, file, f"has {_shown(name)} as {there}, and {META} as float32 of the shape {_shown(shape)}")
        known.add(name)
    for name in found:
        if name not in known:
            raise DamagedCheckpointError(path, file, f"has {_shown(name)}, of which {META} says nothing")


def _shown(what: object) -> str:
    return repr(what)[:100]


def _map(path: Path, file: str) -> dict[str, NDArray[Any]]:
    try:
        return map_arrays(path / file)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(path, file, str(error)) from error
