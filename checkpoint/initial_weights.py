"""Initial weights from a file, which the driver alone reads.

The file is safetensors, or a ``state_dict`` that a process with torch reads without running code. Names are those of the model's
``state_dict``, or canonical ones. Whole numbers and booleans under other names, such as counts of batches, are ignored.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.bounded_json import UnreadableError, open_regular
from ..core.console import one_line
from ..core.errors import MissingPackageError, UsageError
from ..core.job import split_digest, with_digest
from ..core.patterns import matching, refuse_unmatched
from ..core.plugins import module_exists
from ..core.process import child_working_directory, command_ending_with_parent, ending_in_words, public_environment, python
from ..models.base import Array, ModelSpec
from .files import arrays_in

CHILD = "crosstrain.models.imported.torch.state_dict"
MAX_FACTOR = 4  # of the float32 values' bytes: a file may have float64, and tied weights under each of their names
FURTHER_BYTES = 16 << 20  # for a file's header and small state
MAX_SECONDS = 300.0  # for importing torch and reading a state_dict
MAX_NAMED = 3  # of names in a message


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Initial values by canonical name, and their file with its digest (`core.job.with_digest`)."""

    parameters: Mapping[str, Array]
    buffers: Mapping[str, Array]
    file: Path


def read_initial_weights(file: Path, patterns: str | None, spec: ModelSpec, seed: int) -> InitialWeights:
    """Read a model's initial weights; those of names that the `patterns` match are the seed's.

    Raises UsageError for an unusable file, for one that differs from its digest, and for a pattern that matches nothing.
    """
    path, expected = split_digest(file)
    content = _content(path, spec)
    digest = hashlib.sha256(content).hexdigest()
    if expected not in (None, digest):
        raise UsageError(
            f"initial_weights: {str(path)!r} has changed: its sha256 is {digest[:12]}… instead of {str(expected)[:12]}…. Restore it, or "
            "give its path alone."
        )
    values = _fitted(_arrays(content, path, spec), spec, path, patterns)
    if missing := [name for name in _shapes(spec) if name not in values]:
        drawn = {**spec.initial(seed), **spec.initial_buffers(seed)}
        values |= {name: drawn[name] for name in missing}
    return InitialWeights(
        {parameter.name: values[parameter.name] for parameter in spec.parameters},
        {buffer.name: values[buffer.name] for buffer in spec.buffers},
        with_digest(path, digest),
    )


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {part.name: part.shape for part in (*spec.parameters, *spec.buffers)}


def max_file_bytes(spec: ModelSpec) -> int:
    """Return the largest size of a file of a model's weights."""
    return MAX_FACTOR * 4 * (spec.size + spec.buffers_size) + FURTHER_BYTES


def _content(path: Path, spec: ModelSpec) -> bytes:
    most = max_file_bytes(spec)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, most) + 1)
    except (OSError, UnreadableError) as error:
        problem = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise UsageError(f"initial_weights: {str(path)!r} {problem}; give a safetensors file or a torch state_dict.") from error
    if len(content) > most:
        raise UsageError(
            f"initial_weights: {str(path)!r} has {size:,} bytes; at most {most:,} are read for {spec.name}, four times its weights' size. "
            "Save the state_dict alone."
        )
    return content


def _arrays(content: bytes, path: Path, spec: ModelSpec) -> dict[str, NDArray[Any]]:
    if content[8:9] != b"{":  # where the header of every safetensors file begins
        return _state_dict(content, path, max_file_bytes(spec))
    try:
        return arrays_in(np.frombuffer(content, np.uint8))
    except ValueError as error:
        raise UsageError(f"initial_weights: {str(path)!r} {error}. Save it again.") from error


def _state_dict(content: bytes, path: Path, most: int) -> dict[str, NDArray[Any]]:
    if not module_exists("torch"):
        raise MissingPackageError(
            f"initial_weights: {str(path)!r} is no safetensors file, and a state_dict needs torch. Install it with: "
            "pip install 'crosstrain[torch]'"
        )
    try:
        done = subprocess.run(
            command_ending_with_parent(python(CHILD, str(most))),
            input=content,
            capture_output=True,
            cwd=child_working_directory(),
            env={**public_environment(), "CUDA_VISIBLE_DEVICES": ""},
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"initial_weights: reading {str(path)!r} took longer than {MAX_SECONDS:.0f} s. Save it again.") from error
    if done.returncode == UsageError.exit_code:
        raise UsageError(f"initial_weights: {str(path)!r} {done.stdout.decode(errors='replace')}")
    try:
        with np.load(io.BytesIO(done.stdout), allow_pickle=False) as file:
            names, *arrays = (file[key] for key in file.files)
        return dict(zip(msgspec.json.decode(names.tobytes(), type=list[str]), arrays, strict=True))
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, msgspec.DecodeError) as error:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UsageError(
            f"initial_weights: {str(path)!r} cannot be read: the process that reads it {ending_in_words(done.returncode)}"
            f"{f' ({one_line(last)[:200]})' if last else ''}. Save it again."
        ) from error


def _fitted(arrays: Mapping[str, NDArray[Any]], spec: ModelSpec, path: Path, patterns: str | None) -> dict[str, Array]:
    """Return the file's values by canonical name, float32.

    Raises UsageError unless they fit the model.
    """
    shapes, values, unexpected = _shapes(spec), dict[str, Array](), list[str]()
    differing: dict[str, str] = {}  # by canonical name
    names = dict.fromkeys([*shapes, *arrays])
    refuse_unmatched("initial_weights_except", patterns, names)
    kept = matching(patterns, names)
    for written, array in arrays.items():
        name = spec.aliases.get(written, written)
        if kept & {name, written}:
            continue
        if name not in shapes:
            if array.dtype.kind not in "biu":
                unexpected.append(written)
        elif array.shape != shapes[name]:
            differing[name] = f"{written}: {list(array.shape)[:8]} instead of {list(shapes[name])}"
        elif array.dtype.kind not in "fV":
            differing[name] = f"{written}: {array.dtype} instead of float32"
        else:
            value = _as_float32(array)
            if not np.isfinite(value).all():
                raise UsageError(f"initial_weights: {written!r} in {str(path)!r} has values that are not finite as float32.")
            if name in values and not np.array_equal(values[name], value):
                raise UsageError(f"initial_weights: {str(path)!r} has other values for {written!r} than for {name!r}, which are tied.")
            values[name] = value
    missing = [name for name in shapes if name not in values and name not in kept and name not in spec.unsaved and name not in differing]
    problems = [
        f"{len(names):,} {what} ({_listed(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape or type", differing.values()))
        if names
    ]
    if problems:
        source = "the model's state_dict" if spec.source else "`trainer export --format safetensors`"
        raise UsageError(
            f"initial_weights: the tensors of {str(path)!r} do not fit {spec.name}: {', '.join(problems)}. Use the names of {source}, or "
            "leave some at the seed's values: --initial-weights-except PATTERNS."
        )
    return values


def _as_float32(array: NDArray[Any]) -> Array:
    if array.dtype.kind == "V":
        words: NDArray[Any] = np.ascontiguousarray(array).view("<u2").astype("<u4") << 16
        return words.view("<f4").reshape(array.shape)
    with np.errstate(over="ignore"):  # infinite values are refused
        return np.ascontiguousarray(array, np.float32)


def _listed(names: Collection[str]) -> str:
    shown = [one_line(name)[:120] for name in islice(names, MAX_NAMED)]
    return ", ".join([*shown, "…"] if len(names) > MAX_NAMED else shown)
